"""Blocks that run several times and several forwards before one backward: order, bytes and memory as torch has them."""

from __future__ import annotations

import pytest

from tests.zreal.test_event_order import of_program, of_torch
from zsim.backends import find
from zsim.compare import compare
from zsim.run import RunOptions
from zsim.scenario import Scenario, parse
from zsim.simulator import SimBackend

SMALL = "num_layers = 6, hidden_size = 12, num_heads = 2"
MODELS = {
    "mlp": 'family = "mlp", sizes = { dims = [9, 9, 9, 9, 9, 9, 9], hidden = 13, num_classes = 3 }',
    "gpt": f'family = "gpt", sizes = {{ {SMALL}, vocabulary = 13 }}',
    "llama": f'family = "llama", sizes = {{ {SMALL}, feed_forward = 23, vocabulary = 13 }}',
}
STACK = '{ times = 2, order = "stack" }'


def scenario(
    model: str, options: str, *, uses: object = 1, forwards: int = 1, bf16: bool = False, ranks: int = 2, more: str = ""
) -> Scenario:
    text = f"""
model = {{ {MODELS[model]}, uses = {uses} }}
batch = {{ micro_batch = 2, sequence_length = {1 if model == "mlp" else 5}, forwards = {forwards}{more} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {options} }}
precision = {{ parameters = "{"bf16" if bf16 else "fp32"}", reduce = "fp32" }}
"""
    return parse(text.encode(), where="repeats.toml")


def differences(case: Scenario) -> list[str]:
    """What the simulator and a run on the fake process group do not agree on to the last byte."""
    measured = find("fake").run(case, options=RunOptions())
    predicted = SimBackend("cpu").run(case, options=RunOptions(ranks=tuple(rank.rank for rank in measured.ranks)))
    checks = compare(predicted, measured)
    return [one.detail for one in checks if one.status != "unsupported" and not one.detail.startswith("exact")]


@pytest.mark.parametrize(
    ("model", "options", "more"),
    [
        ("mlp", 'name = "fsdp2"', {"uses": 2}),
        ("gpt", 'name = "fsdp2", reshard_after_forward = true', {"uses": 3, "bf16": True}),
        ("gpt", 'name = "fsdp2", reshard_after_forward = false', {"uses": STACK, "forwards": 2}),
        ("llama", 'name = "fsdp2"', {"forwards": 2, "bf16": True}),
        ("mlp", 'name = "fsdp2", sync = "last"', {"uses": 2, "more": ", accumulation = 3"}),
        ("mlp", 'name = "fsdp2", sync = "last"', {"uses": 2, "bf16": True, "more": ", accumulation = 3"}),
        ("mlp", 'name = "fsdp2", reshard_after_forward = 2', {"uses": STACK, "forwards": 2, "ranks": 4}),
        ("mlp", 'name = "hsdp", dp_replicate = 2, sync = "last"', {"uses": 2, "ranks": 4, "more": ", accumulation = 2"}),
        ("mlp", 'name = "fsdp2", forward_prefetch = 1, backward_prefetch = 2', {"uses": 2, "forwards": 2}),
        ("gpt", 'name = "ddp"', {"uses": 2, "forwards": 3}),
        ("llama", 'name = "ddp", gradient_as_bucket_view = true', {"uses": STACK, "more": ", accumulation = 2"}),
        ("mlp", 'name = "zero_redundancy"', {"forwards": 2, "bf16": True, "ranks": 3}),
        ("gpt", 'name = "zero1"', {"uses": 2, "bf16": True}),
        ("mlp", 'name = "zero2", sync = "last"', {"uses": 2, "forwards": 2, "more": ", accumulation = 2"}),
        ("llama", 'name = "zero3"', {"uses": STACK, "forwards": 2}),
        ("mlp", 'name = "zero3", lookahead = 3', {"uses": 2}),
    ],
)
def test_order_bytes_and_memory_are_exact(model: str, options: str, more: dict[str, object]) -> None:
    assert differences(scenario(model, options, **more)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("options", ['name = "fsdp2"', 'name = "fsdp2", reshard_after_forward = true', 'name = "ddp"'])
@pytest.mark.parametrize(
    ("model", "repeated"),
    [("mlp", {"uses": 3}), ("gpt", {"uses": 2, "forwards": 2}), ("llama", {"uses": STACK}), ("llama", {"forwards": 2})],
)
def test_every_allocation_and_free_comes_in_torchs_order(
    model: str, repeated: dict[str, object], options: str, bf16: bool
) -> None:
    case = scenario(model, options, bf16=bf16, **repeated)  # type: ignore[arg-type]
    assert of_program(case) == of_torch(case)


def test_blocks_reduce_old_gradients_first_and_those_of_the_last_micro_batch_apart() -> None:
    """Without synchronisation gradients wait; the last micro-batch's second run finds them, and its first run the new ones."""
    case = scenario("mlp", 'name = "fsdp2", sync = "last"', uses=2, more=", accumulation = 2")
    steady = find("fake").run(case, options=RunOptions()).ranks[0].phases["steady"]
    scattered = [record.nbytes for record in steady.collectives if record.op == "reduce_scatter"]
    block, root = 4 * (10 * 13 + 2 * 14 // 2 * 9 - 0), 0
    assert len(scattered) == 2 * 6 + 1
    assert sum(scattered[:2]) == 2 * scattered[0]
    assert (block, root) != (0, 1)
