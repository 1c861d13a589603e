"""Micro-batches of traced modules whose gradients autograd accumulates elsewhere than where a linear's node ends. To the byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.quick import one_in
from tests.zreal.split_nodes import NUM_UNITS, SPLIT, rows
from tests.zreal.test_user_modules_traced import differences
from zreal.tracing import trace
from zsim.traced import TracedModel
from zsim.training import Accumulated, ParameterGradient

STRATEGIES = {"ddp": 2, "ddp, views": 2, "fsdp2": 2, "hsdp": 4, "zero_redundancy": 2}
"""With how many ranks."""
TEXTS = {"ddp, views": 'name = "ddp", gradient_as_bucket_view = true', "hsdp": 'name = "hsdp", dp_shard = 2, dp_replicate = 2'}
TIMES = [("last", 2), ("every", 2), ("last", 3)]
CASES = [(*pair, *times) for pair in itertools.product(SPLIT, STRATEGIES) for times in TIMES]
QUICK = [case for case in CASES if case[1] in ("ddp", "fsdp2") and case[3] == 2]
"""What the suite takes every time, besides some of the others."""


@pytest.mark.parametrize(
    ("name", "strategy", "sync", "accumulation"),
    QUICK + one_in(7, [case for case in CASES if case not in QUICK]),
)
def test_micro_batches_hold_what_torch_holds(name: str, strategy: str, sync: str, accumulation: int, tmp_path: Path) -> None:
    text = TEXTS.get(strategy, f'name = "{strategy}"') + f', sync = "{sync}"'
    ranks = STRATEGIES[strategy]
    assert differences(SPLIT[name], rows, text, tmp_path, ranks=ranks, accumulation=accumulation) == {}


@pytest.mark.parametrize("name", SPLIT)
def test_so_they_do_in_bfloat16_with_gradients_kept_in_float32(name: str, tmp_path: Path) -> None:
    text = 'name = "fsdp2", sync = "last"'
    assert differences(SPLIT[name], rows, text, tmp_path, ranks=2, accumulation=2, parameters="bf16") == {}


# -- what a trace says of it


def traced(name: str) -> TracedModel:
    """The module with a unit for each of its blocks."""
    return trace(SPLIT[name], rows(), units=[f"layers.{place}" for place in range(NUM_UNITS)], sums_in_place=False)


def turns(model: TracedModel, unit: str) -> list[str]:
    """The gradients of a unit's parameters as they are made (a copy is marked) and, in brackets, accumulated."""
    backward = next(module.backward for module in model.lowered if module.unit == unit)
    return [
        f"[{event.fqn}]" if isinstance(event, Accumulated) else event.fqn + " copied" * event.copied
        for event in backward.memory
        if isinstance(event, Accumulated | ParameterGradient)
    ]


def test_the_bias_of_a_linear_whose_input_does_not_lie_together_is_accumulated_before_the_weight_is_made() -> None:
    model = traced("sliced")
    weight, bias = "layers.1.linear.weight", "layers.1.linear.bias"
    assert turns(model, "layers.1") == [bias, f"[{bias}]", weight, f"[{weight}]"]
    weight, bias = "layers.0.linear.weight", "layers.0.linear.bias"
    assert turns(model, "layers.0") == [weight, bias, f"[{bias}]", f"[{weight}]"]


def test_a_copy_is_told_from_what_autograd_keeps_as_it_is() -> None:
    assert turns(traced("placed"), "layers.2") == ["layers.2.places copied", "[layers.2.places]"]
    weight, bias = "layers.2.weight", "layers.2.bias"
    assert turns(traced("turned"), "layers.2") == [bias, f"[{bias}]", f"{weight} copied", f"[{weight}]"]


def test_a_weight_that_was_turned_before_the_blocks_is_accumulated_after_them() -> None:
    first, *_, last = traced("early").lowered
    assert ParameterGradient("last", waits=True) in last.backward.memory
    assert Accumulated("last") not in last.backward.memory
    assert Accumulated("last") in first.backward.memory
