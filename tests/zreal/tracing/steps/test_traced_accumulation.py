"""Micro-batches of traced modules whose gradients autograd accumulates elsewhere than where a
linear's node ends. To the byte."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.operators.split_nodes import NUM_UNITS, SPLIT, rows
from tests.zreal.tracing.user_steps import Exact
from zreal.tracing.trace import trace
from zsim.autograd.lowered import Accumulated, ParameterGradient
from zsim.autograd.traced.model import TracedModel

UNITS = [f"layers.{index}" for index in range(NUM_UNITS)]
STRATEGIES = ("ddp", "ddp, views", "fsdp2", "hsdp", "zero_redundancy")
TEXTS = {
    "ddp, views": 'name = "ddp", gradient_as_bucket_view = true',
    "hsdp": 'name = "hsdp", dp_shard = 2, dp_replicate = 2',
}
TIMES = [("last", 2), ("every", 2), ("last", 3)]
CASES = [(*pair, *times) for pair in itertools.product(SPLIT, STRATEGIES) for times in TIMES]


@pytest.mark.parametrize(("name", "strategy", "sync", "accumulation"), one_in(3, CASES))
def test_micro_batches_hold_what_torch_holds(
    name: str, strategy: str, sync: str, accumulation: int, exact: Exact
) -> None:
    text = TEXTS.get(strategy, f'name = "{strategy}"') + f', sync = "{sync}"'
    exact(SPLIT[name], rows, text, accumulation=accumulation)


@pytest.mark.parametrize("name", ["sliced", "turned", "placed"])
def test_so_they_do_in_bfloat16_with_gradients_kept_in_float32(name: str, exact: Exact) -> None:
    text = 'name = "fsdp2", sync = "last"'
    exact(SPLIT[name], rows, text, accumulation=2, parameters="bf16")


# -- every allocation and free, in order

RESHARDING = 'name = "fsdp2", reshard_after_forward = true'
APART = [
    *itertools.product(
        SPLIT, ("ddp", "ddp, views", "zero_redundancy", "fsdp2", RESHARDING), ("last", "every")
    )
]
ORDERS = [case for case in APART if case[0] != "decoders" or "fsdp2" in case[1]]
"""Decoders share an input, whose gradients are summed where fully_shard's hooks let them through:
without those, some sums are earlier."""


@pytest.mark.parametrize(("name", "strategy", "sync"), [
    case
    if case[1:] in (("ddp", "last"), ("fsdp2", "last"))
    else pytest.param(*case, marks=pytest.mark.slow)
    for case in ORDERS
])
def test_every_allocation_and_free_of_two_micro_batches_comes_in_torchs_order(
    name: str, strategy: str, sync: str, exact: Exact
) -> None:
    text = TEXTS.get(strategy, strategy if "=" in strategy else f'name = "{strategy}"')
    exact(SPLIT[name], rows, f'{text}, sync = "{sync}"', accumulation=2, order=True)


# -- what a trace says of it


@cache
def traced(name: str) -> TracedModel:
    """The module with a unit for each of its blocks."""
    return trace(SPLIT[name], rows(), units=UNITS, sums_in_place=False)


def turns(model: TracedModel, unit: str) -> list[str]:
    """The gradients of a unit's parameters as they are made (a copy is marked) and, in brackets,
    accumulated."""
    backward = next(module.backward for module in model.lowered if module.unit == unit)
    return [
        f"[{event.fqn}]"
        if isinstance(event, Accumulated)
        else event.fqn + " copied" * event.is_copy
        for event in backward.memory
        if isinstance(event, Accumulated | ParameterGradient)
    ]


def test_the_bias_of_a_linear_of_cut_inputs_is_accumulated_before_the_weight_is_made() -> None:
    model = traced("sliced")
    weight, bias = "layers.1.linear.weight", "layers.1.linear.bias"
    assert turns(model, "layers.1") == [bias, f"[{bias}]", weight, f"[{weight}]"]
    weight, bias = "layers.0.linear.weight", "layers.0.linear.bias"
    assert turns(model, "layers.0") == [weight, bias, f"[{bias}]", f"[{weight}]"]


def test_a_copy_is_told_from_what_autograd_keeps_as_it_is() -> None:
    assert turns(traced("placed"), "layers.2") == ["layers.2.places copied", "[layers.2.places]"]
    weight, bias = "layers.2.weight", "layers.2.bias"
    assert turns(traced("turned"), "layers.2") == [
        bias, f"[{bias}]", f"{weight} copied", f"[{weight}]"
    ]


def test_a_weight_that_was_turned_before_the_blocks_is_accumulated_after_them() -> None:
    first, *_, last = traced("early").lowered
    assert ParameterGradient("last", accumulation_is_marked=True) in last.backward.memory
    assert Accumulated("last") not in last.backward.memory
    assert Accumulated("last") in first.backward.memory
