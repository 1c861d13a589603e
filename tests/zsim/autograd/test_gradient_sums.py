"""A parameter that a step reads more than once gets its gradients added up, in kernels that take
time: counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

SIZES = "num_layers = 2, hidden_size = 16, num_heads = 2, feed_forward = 32, vocabulary = 50"
FSDP2 = 'name = "fsdp2"'


def added(
    strategy: str, *, model: str = "", batch: str = "", parameters: str = "bf16"
) -> Counter[str]:
    """Bytes of additions by operator and kind of op in a steady step."""
    text = f"""
model = {{ family = "llama", sizes = {{ {SIZES}{", tied = true" if "tied" in model else ""} }}{model.replace(", tied", "")} }}
batch = {{ micro_batch = 2, sequence_length = 8{batch} }}
cluster = {{ preset = "dgx-h100", ranks = 2 }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{parameters}", reduce = "fp32" }}
"""  # noqa: E501
    counts: Counter[str] = Counter()
    for op in plan(parse(text.encode(), where="sums.toml"), device="cuda").ranks[0].steady:
        for kernel in op.kernels:
            if kernel.operator == "add":
                counts[op.kind] += kernel.nbytes
    return counts


ATTENTION, MLP, NORMS, EMBEDDING = 4 * 16 * 16, 3 * 16 * 32, 2 * 16, 50 * 16
BLOCKS = 2 * (ATTENTION + MLP + NORMS)


@pytest.mark.parametrize("strategy", [FSDP2, 'name = "ddp"', 'name = "zero1"', 'name = "zero3"'])
def test_blocks_that_run_twice_add_each_gradient_once(strategy: str) -> None:
    """Two gradients read and one written, of every parameter of the blocks; the adds of values
    double with the blocks."""
    once, twice = added(strategy), added(strategy, model=", uses = 2")
    values = once["backward"]
    assert twice["backward"] - 2 * values == 3 * 2 * BLOCKS


def test_two_forwards_before_a_backward_add_each_gradient_once() -> None:
    once, twice = added(FSDP2), added(FSDP2, batch=", forwards = 2")
    assert twice["backward"] - 2 * once["backward"] == 3 * 2 * (BLOCKS + 2 * EMBEDDING + 16)


def test_a_tied_weight_adds_its_two_gradients() -> None:
    assert added(FSDP2, model=", tied")["backward"] - added(FSDP2)["backward"] == 3 * 2 * EMBEDDING


def test_fsdp1_adds_them_where_it_joins_the_gradients_of_its_views_and_nowhere_else() -> None:
    flat = 'name = "fsdp1", dp_shard = 2, dp_replicate = 1'
    once, twice = added(flat), added(flat, model=", uses = 2")
    assert twice["backward"] == 2 * once["backward"]
    assert twice["copy"] > once["copy"] == 0


@pytest.mark.parametrize(("accumulation", "source"), [(1, 2), (2, 4)])
def test_gradients_kept_in_the_reduce_dtype_are_copied_in_from_it(
    accumulation: int, source: int
) -> None:
    """A block's gradients into the input of its reduce-scatter in float32: read in bf16, or kept in
    float32 by an earlier micro-batch."""
    text = f"""
model = {{ family = "llama", sizes = {{ {SIZES} }} }}
batch = {{ micro_batch = 2, sequence_length = 8, accumulation = {accumulation} }}
cluster = {{ preset = "dgx-h100", ranks = 2 }}
strategy = {{ {FSDP2}, sync = "last" }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
"""
    steady = plan(parse(text.encode(), where="kept.toml"), device="cuda").ranks[0].steady
    reduced = next(op for op in steady if op.kind == "reduce_scatter" and op.unit == "blocks.1")
    (copied,) = (steady[wait] for wait in reduced.waits if steady[wait].kind == "copy")
    assert sum(kernel.nbytes for kernel in copied.kernels) == BLOCKS // 2 * (source + 4)
