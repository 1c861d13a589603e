"""Calls that need a gradient, and the rest of their backward where parameters are frozen.

Autograd computes a derivative only for an input that requires it. A product saves a factor only for
the gradient of the other factor. A frozen weight gets no gradient. Nothing before the first trained
parameter is saved or run backward. A formula for several inputs at once (norms, fused attention)
saves everything as soon as one of them needs a gradient. Source: generated code of
torch/csrc/autograd, from tools/autograd/derivatives.yaml; observed on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zsim.autograd.aten.call import Call
from zsim.ir.ops import NORM_STEP

PRODUCTS = ("linear", "conv1d", NORM_STEP)
"""Operators with a call that multiplies by the weight and saves one factor for the gradient of the
other. A fused norm has none."""


def needed(calls: Iterable[Call], *, needs: set[str], frozen: frozenset[str]) -> tuple[Call, ...]:
    """`calls` of one operator, each reduced to what autograd differentiates. Adds the values that
    need a gradient to `needs`."""
    reduced = []
    for call in calls:
        call = _reduced(call, needs=needs, frozen=frozen)
        if call.differentiable:
            needs.update((call.output, *call.also))
        reduced.append(call)
    return tuple(reduced)


def _reduced(call: Call, *, needs: set[str], frozen: frozenset[str]) -> Call:
    """`call` without what frozen parameters and constant inputs leave out."""
    if call.parameters:
        trained = tuple(name for name in call.parameters if name not in frozen)
    else:
        trained = tuple(name for name in call.weights if name in needs)
    wanting = tuple(value for value in call.inputs if value in needs)
    if not trained and not wanting:
        return replace(
            call, saves=(), gradients=(), passes=(), summed=(), parameters=(), weights=(),
            backward_scratch=(), differentiable=False,
        )
    if trained == (call.parameters or call.weights) and wanting == call.inputs:
        return call
    return _partly(call, trained=trained, wanting=wanting, needs=needs)


def _partly(
    call: Call, *, trained: tuple[str, ...], wanting: tuple[str, ...], needs: set[str]
) -> Call:
    """`call` of which only the `trained` parameters and the inputs in `wanting` get gradients."""
    own = call.parameters or call.weights
    constant_weight = own[:1] != trained[:1]  # the weight comes first
    is_product = call.operator in PRODUCTS and bool(own) and not call.keeps
    halves = constant_weight or (call.crossed and len(wanting) < len(call.inputs))
    makes = {*trained, *(call.inputs if call.joint else wanting)}
    return replace(
        call,
        saves=_saves(call, is_product and constant_weight, wanting=wanting, needs=needs),
        gradients=tuple(name for name in call.gradients if name in makes),
        passes=tuple(name for name in call.passes if name in wanting),
        summed=tuple(item for item in call.summed if item[0] in makes),
        parameters=trained if call.parameters else (),
        weights=call.weights if call.parameters else trained,
        backward_scratch=() if call.parameters and not trained else call.backward_scratch,
        backward_flops=(
            0 if constant_weight and not wanting else call.backward_flops // (1 + halves)
        ),
        backward_moved=call.backward_moved // (1 + halves),
        packs=is_product and bool(wanting),
    )


def _saves(
    call: Call, by_constant_weight: bool, *, wanting: tuple[str, ...], needs: set[str]
) -> tuple[str, ...]:
    """The values that autograd saves: of a product, each factor for the other one's gradient."""
    if call.crossed:
        pairs = zip(call.saves, call.saves[::-1], strict=True)
        return tuple(value for value, other in pairs if other in needs)
    if by_constant_weight:  # a weight of its own costs nothing, a copy of it does
        return tuple(value for value in call.saves if value in call.weights and wanting)
    return call.saves
