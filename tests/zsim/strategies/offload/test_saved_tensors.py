"""Tensors that autograd saves, in host memory: what crosses the link, what is left on the device,
what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from zsim.autograd.host_copies import KEPT
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.lowering.lower_module import lower_each
from zsim.engine.costs.host_work import PAGEABLE_SHARE
from zsim.errors import ScenarioError
from zsim.ir.host_ledger import replay_host
from zsim.ir.laws import program_laws
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import Op
from zsim.ir.program import Program
from zsim.ir.program import parse as parse_program
from zsim.memory.fits import assess
from zsim.models.checkpointing import Checkpointing
from zsim.models.training_options import SavedTensorsHook
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.keys.foreign_keys import FOREIGN_KEYS
from zsim.scenario.plan import plan, planned
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies import STRATEGIES
from zsim.testing.strategies.scenarios import scenario_tables

SAVED = 'activations = "saved_tensors"'
INPUTS = 'activations = "checkpoint_inputs"'
MESHES = {"hsdp": ", dp_replicate = 2, dp_shard = 4"}
ALONE = {"single": ", ranks = 1"}


def scenario(
    strategy: str = "fsdp2", offload: str = SAVED, *, checkpointing: str = "none",
    model: str = "gpt-tiny", cluster: str = 'preset = "dgx-a100"', tokens: int = 16,
    micro_batch: int = 1, accumulation: int = 1, more: str = "",
) -> Scenario:
    text = f"""
model.preset = "{model}"
batch.micro_batch = {micro_batch}
batch.sequence_length = {tokens}
batch.accumulation = {accumulation}
cluster = {{ {cluster}{ALONE.get(strategy, "")} }}
strategy = {{ name = "{strategy}"{MESHES.get(strategy, "")} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
optimizer = {{ implementation = "fused" }}
activation_checkpointing.mode = "{checkpointing}"
offload = {{ {offload} }}
{more}
"""
    return parse(text.encode(), where="saved.toml")


def copies(program: Program) -> list[Op]:
    return [op for op in program.of_rank(0).steady if op.unit.endswith(":saved_tensors")]


def crossed(program: Program, direction: str) -> list[int]:
    kernels = [kernel for op in copies(program) for kernel in op.kernels]
    return [kernel.nbytes for kernel in kernels if kernel.operator.startswith(direction)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_goes_to_the_host_returns_once_and_leaves_nothing_there(
    strategy: str, checkpointing: str
) -> None:
    program = plan(scenario(strategy, checkpointing=checkpointing, accumulation=2), device="cuda")
    program_laws.require_lawful(program, where="saved tensors")
    assert parse_program(str(program)) == program
    sent, returned = crossed(program, "to_host"), crossed(program, "to_device")
    assert sorted(sent) == sorted(returned)
    host = replay_host(program.of_rank(0))["steady"]
    assert (2 * host.saved_bytes, host.end_bytes) == (sum(sent), 0)


def test_of_checkpointed_blocks_only_inputs_go_there() -> None:
    """bf16 in 4 blocks of width 64, 16 tokens: an input each."""
    program = plan(scenario(checkpointing="full"), device="cuda")
    sent = {op.unit: [k.nbytes for k in op.kernels] for op in copies(program)
            if op.kernels[0].operator == "to_host"}
    for block in range(4):
        assert sent[f"blocks.{block}:saved_tensors"] == [16 * 64 * 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_of_checkpoints_cross_but_for_the_last_which_stay(strategy: str) -> None:
    """bf16 in 4 blocks of width 64, 16 tokens. Two inputs are on the device when backward begins;
    the others return, each while the block after theirs is recomputed."""
    program = plan(
        scenario(strategy, INPUTS, checkpointing="full", accumulation=2), device="cuda"
    )
    program_laws.require_lawful(program, where="inputs")
    assert parse_program(str(program)) == program
    each, rank = 16 * 64 * 2, program.of_rank(0)
    assert crossed(program, "to_host") == [each] * 2 * 4
    assert crossed(program, "to_device") == [each] * 2 * (4 - KEPT)
    host = replay_host(rank)["steady"]
    assert (host.saved_bytes, host.end_bytes) == (4 * each, 0)
    returns = [op for op in copies(program) if op.kernels][4:6]
    assert [op.unit.replace(":", ".").split(".")[1] for op in returns] == ["2", "1"]
    assert {op.stream for op in returns} == {"to_device"}


def test_between_forward_and_backward_the_device_keeps_the_last_inputs() -> None:
    ranks = [
        plan(scenario("ddp", offload, checkpointing="full"), device="cuda").of_rank(0)
        for offload in ("", INPUTS)
    ]
    kept, left = (
        next(part.start_bytes for part in replay(rank)["steady"].parts if part.name == "backward")
        for rank in ranks
    )
    assert kept - left == (4 - KEPT) * 16 * 64 * 2


def test_copies_beside_compute_hide_until_the_link_is_slower_than_a_block() -> None:
    """Copies to the host and back on a slow link are what the step takes, and compute at most."""
    sizes = {"model": "gpt-2-124m", "tokens": 1024, "micro_batch": 4, "checkpointing": "full"}
    kept, beside, between = (
        scenario("ddp", offload, **sizes) for offload in ("", INPUTS, SAVED)
    )
    hidden = step_ns(beside) - step_ns(kept)
    assert hidden < 0.02 * step_ns(kept) < step_ns(between) - step_ns(kept)
    slow = replace(
        kept.cluster, links=replace(
            kept.cluster.links, host=replace(kept.cluster.links.host, bandwidth=10**9)
        )
    )
    on_slow = step_ns(derived(beside, cluster=slow))
    for direction in ("to_host", "to_device"):
        nbytes = sum(crossed(plan(beside, device="cuda"), direction))
        assert on_slow > nbytes * 2
    assert on_slow < 2 * sum(crossed(plan(beside, device="cuda"), "to_")) + step_ns(kept)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_between_forward_and_backward_the_device_has_the_loss_alone(checkpointing: str) -> None:
    program = plan(scenario("ddp", checkpointing=checkpointing), device="cuda").of_rank(0)
    kept = plan(
        scenario("ddp", "", checkpointing=checkpointing), device="cuda"
    ).of_rank(0)
    at_rest, saved, there = (
        next(part for part in replay(rank)["steady"].parts if part.name == name).start_bytes
        for rank, name in ((program, "forward"), (program, "backward"), (kept, "backward"))
    )
    assert saved - at_rest == 2 < there - at_rest


@settings(max_examples=20)
@given(scenario_tables(), st.sampled_from(["saved_tensors", "checkpoint_inputs"]))
def test_whatever_is_trained_copies_return_and_the_device_keeps_no_more(
    tables: dict[str, Any], what: str
) -> None:
    tables = {key: value for key, value in tables.items() if key != "offload"}
    try:
        case = Scenario(**tables, offload={"activations": what})
    except ScenarioError:  # blocks that are not checkpointed
        reject()
    program = plan(case, device="cuda")
    program_laws.require_lawful(program, where="saved tensors")
    sent, returned = sum(crossed(program, "to_host")), sum(crossed(program, "to_device"))
    assert returned == sent if what == "saved_tensors" else returned <= sent
    at_backward = []
    for each in (program, plan(Scenario(**tables), device="cuda")):
        rank = each.of_rank(0)
        assert replay_host(rank)["steady"].end_bytes == 0
        parts = [part for part in replay(rank)["steady"].parts if part.name == "backward"]
        at_backward.append([part.start_bytes for part in parts])
    assert all(left <= kept for left, kept in zip(*at_backward, strict=True))


def step_ns(case: Scenario, *, all_ranks: bool = False) -> int:
    took = SimBackend().run(case, options=RunOptions(all_ranks=all_ranks)).step_time_ns
    assert took is not None
    return took


@pytest.mark.parametrize(("pin", "share"), [
    ("true", Fraction(1, 2)), ("false", PAGEABLE_SHARE),
])
def test_copies_add_their_time_on_a_link_that_two_gpus_share(pin: str, share: Fraction) -> None:
    """They stand between kernels on compute's stream, or the host waits for them. Pinned ones get
    half of the link; pageable ones want less than that anyway. Behind these the host does not issue
    ahead, which is little beside a large micro-batch."""
    sizes = {"model": "gpt-2-124m", "tokens": 1024, "micro_batch": 32}
    case = scenario("ddp", f"{SAVED}, pin_memory = {pin}", **sizes)
    kept = scenario("ddp", "", **sizes)
    nbytes = sum(crossed(plan(case, device="cuda"), "to_"))
    copied = nbytes * 10**9 / (case.cluster.links.host.bandwidth * share)
    assert step_ns(case) - step_ns(kept) == pytest.approx(float(copied), rel=0.01)


def test_activations_share_the_link_with_offloaded_parameters() -> None:
    """A link of 1 GB/s for two GPUs, each way at once: what goes to the device takes 2 ns a byte at
    least."""
    states = 'optimizer = "cpu", parameters = "cpu"'
    sizes = {"model": "gpt-2-124m", "tokens": 1024, "micro_batch": 4, "checkpointing": "full"}
    both, alone = scenario("zero3", f"{states}, {INPUTS}", **sizes), scenario(
        "zero3", states, **sizes
    )
    links = both.cluster.links
    slow = replace(
        both.cluster, links=replace(links, host=replace(links.host, bandwidth=10**9)),
        host=replace(both.cluster.host, duplex=1.0),
    )
    took = [step_ns(derived(case, cluster=slow)) for case in (both, alone)]
    sent = [
        sum(
            kernel.nbytes for op in plan(case, device="cuda").of_rank(0).steady
            for kernel in op.kernels if kernel.operator == "to_device"
        )
        for case in (both, alone)
    ]
    assert took[0] > 2 * sent[0] > took[1] > 2 * sent[1]


def test_a_host_without_room_is_the_verdict_s_though_the_device_fits() -> None:
    """Eight ranks that keep 8 GB each in a host of 64 GB, whose system takes more than the rest."""
    case = scenario(
        "ddp", model="gpt-2-124m", tokens=1024, micro_batch=16,
        cluster='preset = "dgx-a100"',
    )
    small = replace(case.cluster, host=replace(case.cluster.host, memory=64 * 10**9))
    assert assess(planned(case)).verdict == "FITS"
    answer = assess(planned(derived(case, cluster=small)))
    assert answer.host is not None
    assert (answer.on_device, answer.host.verdict, answer.verdict) == ("FITS", "OOM", "OOM")
    assert answer.host.by_kind == {"activations": answer.host.offloaded_bytes}


@pytest.mark.parametrize(("pin", "rounds"), [("true", True), ("false", False)])
def test_pinned_copies_take_blocks_of_powers_of_two(pin: str, rounds: bool) -> None:
    """17 tokens of 64 elements in bf16 are 2,176 B, in a block of 4,096 B."""
    case = scenario("ddp", f"{SAVED}, pin_memory = {pin}", checkpointing="full", tokens=17)
    answer, sent = assess(planned(case)).host, crossed(plan(case, device="cuda"), "to_host")
    assert answer is not None
    assert 17 * 64 * 2 in sent
    blocks = [next(2**n for n in range(40) if 2**n >= nbytes) for nbytes in sent]
    assert answer.rounding_bytes == 8 * (sum(blocks) - sum(sent)) * rounds
    assert answer.needed_bytes == (
        8 * sum(sent) + answer.rounding_bytes + answer.other_bytes
    )


def test_blocks_lowered_once_save_as_blocks_lowered_each() -> None:
    model, batch = scenario(more="model.num_layers = 4").model, scenario().batch
    hook = SavedTensorsHook(tensors="saved_tensors")
    for checkpointing in (Checkpointing(), Checkpointing(mode="full")):
        ways = {"batch": batch, "dtype": "float32", "checkpointing": checkpointing}
        alone = lower_each(
            model, **ways, checkpointed=checkpointing.applies_to(model), saving=hook
        )
        assert lower(model, **ways, saving=hook) == alone


@pytest.mark.parametrize(("strategy", "offload", "refusal"), [
    ("ddp", f"{SAVED}, buffer_count = 8", 'expected with offload.optimizer = "cpu"'),
    ("ddp", 'activations = "nvme"', "offload.activations: expected"),
    ("ddp", INPUTS, 'expected activation_checkpointing.mode = "full"'),
    ("ddp", f"{INPUTS}, pin_memory = false", "offload.pin_memory: expected true"),
])
def test_what_saves_no_tensors_on_the_host_is_refused(
    strategy: str, offload: str, refusal: str
) -> None:
    with pytest.raises(ScenarioError, match=refusal):
        scenario(strategy, offload)


@pytest.mark.parametrize(
    "key", [key for key in FOREIGN_KEYS
            if key.partition(".")[0] not in ("model", "offload", "optimizer", "precision",
                                             "strategy")]
)
def test_keys_of_deepspeed_s_config_are_refused_by_name(key: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(more=f"{key} = true")
    assert f"{key}: {FOREIGN_KEYS[key]}" in str(error.value)


@pytest.mark.parametrize("key", [key for key in FOREIGN_KEYS if key.startswith("offload.")])
def test_keys_of_deepspeed_s_offload_are_refused_by_name(key: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(offload=f"{SAVED}, {key.removeprefix('offload.')} = 1")
    assert f"{key}: {FOREIGN_KEYS[key]}" in str(error.value)
