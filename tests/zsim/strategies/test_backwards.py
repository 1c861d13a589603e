"""Backwards of modules: one that is as in the micro-batch before is the same object, any other is
made anew."""

from __future__ import annotations

from itertools import pairwise

import pytest

import zsim
from zsim.autograd.lowered import (
    NOTHING,
    Accumulated,
    Computation,
    LoweredModule,
    ParameterGradient,
    TapeEvent,
)
from zsim.ir.ops import Alloc, Free
from zsim.scenario.plan import plan
from zsim.strategies.building.backward_events import Backwards, Birth, until_recomputed


def module(name: str, *tape: TapeEvent) -> LoweredModule:
    return LoweredModule(
        fqn=name, unit=name, forward=NOTHING, backward=Computation(kernels=(), memory=tape),
        input_needs_gradient=True,
    )


def born(event: ParameterGradient) -> Birth:
    return [Alloc(event.fqn, "gradients", 4)], [Free(event.fqn)]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "zero1", "zero3", "ddp"])
def test_micro_batches_that_find_the_same_gradients_have_the_same_events(strategy: str) -> None:
    rank = plan(zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "accumulation": 4},
        cluster={"preset": "dgx-h100", "ranks": 2}, strategy={"name": strategy},
    ), device="cuda").ranks[0]
    second, third = (
        [op.memory for op in rank.steady
         if op.micro_batch == number and op.kind in ("backward", "recompute")]
        for number in (1, 2)
    )
    assert second
    assert len(second) == len(third)
    for mine, other in zip(second, third, strict=True):
        assert mine is other


def test_a_backward_is_made_anew_where_its_tape_or_a_gradient_or_what_comes_first_is_another() -> (
    None
):
    backwards = Backwards(until_recomputed, frozenset())
    own = module("a", ParameterGradient("w"), Alloc("x", "temporaries", 2), Free("x"))
    tape = own.backward.memory
    cuts = [
        backwards.of(own, tape, born), backwards.of(own, list(tape), born),
        backwards.of(own, tape, lambda _: ([], [])), backwards.of(own, tape, born),
        backwards.of(own, tape, born, first=[Alloc("z", "gradients", 1)]),
        backwards.of(own, tape[:1], born),
    ]
    made, freed = Alloc("w", "gradients", 4), Free("w")
    assert [events for _, events in cuts] == [
        (made, *tape[1:], freed), (made, *tape[1:], freed), tape[1:], (made, *tape[1:], freed),
        (Alloc("z", "gradients", 1), made, *tape[1:], freed), (made, freed),
    ]
    again = backwards.of(own, tape, born)
    assert again is backwards.of(own, tape, born)
    assert all(left is not right for left, right in pairwise(cuts))


def test_a_gradient_that_waits_for_its_mark_in_a_later_module_comes_there_every_time() -> None:
    backwards = Backwards(until_recomputed, frozenset())
    early = module("b", ParameterGradient("w", accumulation_is_marked=True))
    late = module("a", Accumulated("w"))
    for _ in range(3):
        told = [backwards.of(each, each.backward.memory, born)[1] for each in (early, late)]
        assert told == [(Alloc("w", "gradients", 4),), (Free("w"),)]
    assert not backwards.waiting
