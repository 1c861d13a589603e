"""Memory that torch's own tests expect of fully_shard, FSDP and a plain model, as formulas of ours.

The table of all its expectations is tests/torch_expectations.md. torch allows 16 MB for whatever is
neither weight nor gradient; here those kinds are left out, and nothing is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from zsim.ir.ledger import Ledger
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import MemoryKind
from zsim.ir.run import MemoryRecord
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

OF_WEIGHTS: tuple[MemoryKind, ...] = (
    "parameters", "gradients", "unsharded_parameters", "unsharded_gradients", "communication",
)
BIASES = 4 * 9 * 768
"""Bytes of the biases of one block."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of torch's formulas: a rank's shard, one whole block, all that is in no block."""

    shard: int
    block: int
    rest: int

    @property
    def whole(self) -> int:
        """Bytes of all parameters."""
        return 3 * self.block + self.rest


def scenario(keep: str, *, offload: str = "false") -> Scenario:
    """torch's model: three blocks of width 768, untied, four tokens, two ranks, Adam tensor by
    tensor."""
    text = f"""
model = {{ family = "gpt", sizes = {{ num_layers = 3, hidden_size = 768, num_heads = 12, vocabulary = 32, tied = false }} }}
batch = {{ micro_batch = 1, sequence_length = 4 }}
cluster = {{ preset = "dgx-h100", ranks = 2 }}
strategy = {{ name = "fsdp2", reshard_after_forward = {keep}, offload = {offload} }}
optimizer = {{ name = "adamw", implementation = "for-loop" }}
"""  # noqa: E501
    return parse(text.encode(), where="expected.toml")


def sizes(case: Scenario) -> Sizes:
    """Sizes of the model in float32."""
    units = {unit.fqn: 4 * unit.numel for unit in case.model.units}
    return Sizes(
        shard=2 * case.model.num_parameters, block=units["blocks.0"], rest=units["root"]
    )


def highest(case: Scenario) -> Mapping[str, int]:
    """Most bytes of weights, gradients and their buffers in forward and in backward of the first
    step."""
    program = plan(case, device="cuda").of_rank(0)
    ledger, peaks = Ledger(), {"forward": 0, "backward": 0}
    for op in program.construction:
        ledger.apply(op)
    starts = {part.start: part.name for part in program.parts("first")}
    part = ""
    for op in program.first:
        part = starts.get(op.index, part)
        for event in op.memory:
            if hasattr(event, "nbytes"):
                ledger.allocate(event)
            else:
                ledger.free(event.buffer)
            if part in peaks:
                live = sum(ledger.by_kind[kind] for kind in OF_WEIGHTS)
                peaks[part] = max(peaks[part], live)
    return peaks


def test_forward_holds_two_gathered_blocks_the_one_copied_out_and_the_root() -> None:
    """test_fully_shard_memory.py, forward with reshard_after_forward: its bound is attained."""
    case = scenario("true")
    size = sizes(case)
    assert highest(case)["forward"] == size.shard + size.rest + 3 * size.block


def test_offloaded_forward_holds_the_same_but_the_shard() -> None:
    """test_fully_shard_memory.py, forward with parameters offloaded: its bound is attained."""
    case = scenario("true", offload="true")
    size = sizes(case)
    assert highest(case)["forward"] == size.rest + 3 * size.block


def test_forward_that_keeps_blocks_holds_a_gathered_block_more_than_torch_counts() -> None:
    """test_fully_shard_memory.py, forward without reshard: its bound has one block beside all
    parameters. torch 2.13 holds two, for a local name in wait_for_unshard keeps the last
    all-gather's output until the next is copied out."""
    case = scenario("false")
    size = sizes(case)
    assert highest(case)["forward"] == size.shard + size.whole + 2 * size.block


def test_backward_holds_four_blocks_while_gradients_of_others_are_still_to_come() -> None:
    """test_fully_shard_memory.py, backward with reshard_after_forward. Its bound is attained but
    for gradients of tables and of biases, which come last."""
    case = scenario("true")
    size = sizes(case)
    bound = 2 * size.shard + size.rest + 3 * size.block
    assert 0 <= bound - highest(case)["backward"] <= size.rest + BIASES


def test_backward_of_kept_blocks_begins_with_the_copy_of_the_last_ones_gradients() -> None:
    """test_fully_shard_memory.py, backward without reshard: its bound is attained. Gradients of the
    head and of the last norm come on top, which torch leaves to its 16 MB."""
    case = scenario("false")
    size, head = sizes(case), 4 * (32 + 2) * 768
    assert highest(case)["backward"] == size.shard + size.whole + 3 * size.block // 2 + head


def test_offloaded_backward_holds_a_block_more_than_torch_counts() -> None:
    """test_fully_shard_memory.py, backward with parameters offloaded: its bound counts a gathered
    block, gradients and their copy, but not the parameters of the block that runs. Without offload
    gradients that are not there yet make up for them."""
    case = scenario("true", offload="true")
    size = sizes(case)
    more = highest(case)["backward"] - (size.rest + 3 * size.block)
    assert 0 <= size.block + size.rest - more <= size.rest + BIASES


def steps(case: Scenario) -> tuple[MemoryRecord, MemoryRecord, MemoryRecord]:
    """Memory of construction, first and steady step of rank 0."""
    records = replay(plan(case, device="cuda").of_rank(0))
    return records["construction"], records["first"], records["steady"]


def starts(record: MemoryRecord) -> dict[str, int]:
    """Bytes at the start of each part of a step."""
    return {part.name: part.start_bytes for part in record.parts}


@pytest.mark.parametrize("keep", ["true", "false"])
def test_sharding_adds_one_block_and_steps_need_four_shards_then_three(keep: str) -> None:
    """test_fully_shard_memory.py: wrapping, optimizer step, zero_grad."""
    case = scenario(keep)
    size = sizes(case)
    made, first, _ = steps(case)
    assert made.end_bytes == size.shard
    assert made.peak_bytes <= size.shard + size.block
    assert starts(first)["optimizer"] == 2 * size.shard
    assert starts(first)["zero_grad"] == 4 * size.shard
    assert first.end_bytes == 3 * size.shard


def test_offloaded_nothing_is_left_on_the_device() -> None:
    """test_fully_shard_memory.py: wrapping, optimizer step, zero_grad with parameters offloaded."""
    case = scenario("true", offload="true")
    made, first, _ = steps(case)
    assert made.peak_bytes <= 3 * sizes(case).block // 2
    assert made.end_bytes == 0
    assert (starts(first)["optimizer"], starts(first)["zero_grad"], first.end_bytes) == (0, 0, 0)


@pytest.mark.parametrize("more", ["", 'activation_checkpointing = { mode = "full" }'])
def test_fsdp1_with_momentum_holds_one_two_and_three_shards(more: str) -> None:
    """fsdp/test_fsdp_memory.py: start, after backward, after the step, after zero_grad, of the
    first iteration and of later ones."""
    text = f"""
model = {{ family = "mlp", sizes = {{ dims = [16, 16, 16], hidden = 32, num_classes = 8 }} }}
batch = {{ micro_batch = 2 }}
cluster = {{ preset = "dgx-h100", ranks = 2 }}
strategy = {{ name = "fsdp1", dp_shard = 2, dp_replicate = 1 }}
optimizer = {{ name = "sgd", momentum = 0.9 }}
{more}
"""
    case = parse(text.encode(), where="expected.toml")
    shard = 2 * case.model.num_parameters
    made, first, steady = steps(case)
    assert all(unit.numel % 2 == 0 for unit in case.model.units)
    assert made.end_bytes == first.start_bytes == shard
    assert (starts(first)["optimizer"], starts(first)["zero_grad"]) == (2 * shard, 3 * shard)
    assert first.end_bytes == steady.start_bytes == steady.end_bytes == 2 * shard
    assert (starts(steady)["optimizer"], starts(steady)["zero_grad"]) == (3 * shard, 3 * shard)


def test_parameters_gradients_and_states_come_and_go_as_they_are_attributed() -> None:
    """_tools/test_mem_tracker.py, attribution: before forward, after backward, after the step,
    after zero_grad. torch allows 10 %; these are equal."""
    text = """
model = { family = "mlp", sizes = { dims = [128, 128, 128, 128], hidden = 256, num_classes = 10 } }
batch = { micro_batch = 16 }
cluster = { preset = "dgx-h100", ranks = 1 }
strategy = { name = "ddp" }
optimizer = { name = "adamw", implementation = "foreach" }
"""
    case = parse(text.encode(), where="expected.toml")
    program, nbytes = plan(case, device="cuda").of_rank(0), 4 * case.model.num_parameters
    ledger, held = Ledger(), []
    for op in program.construction:
        ledger.apply(op)
    boundaries = {part.start for part in program.parts("first")}
    for op in program.first:
        if op.index in boundaries:
            held.append(_held(ledger))
        ledger.apply(op)
    held.append(_held(ledger))
    assert held == [
        (nbytes, 0, 0), (nbytes, 0, 0), (nbytes, nbytes, 0), (nbytes, nbytes, 2 * nbytes),
        (nbytes, 0, 2 * nbytes),
    ]


def _held(ledger: Ledger) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states."""
    return (
        ledger.by_kind["parameters"], ledger.by_kind["gradients"],
        ledger.by_kind["optimizer_states"],
    )
