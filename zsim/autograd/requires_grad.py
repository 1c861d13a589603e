"""Which calls need a gradient, and what is left of their backward where parameters are frozen.

autograd asks each derivative for whom it is: a product keeps a factor for the gradient of the other
one only, a frozen weight has no gradient to be made, and nothing before the first trained parameter
is kept or run backward. What a formula makes for several inputs at once (norms, fused attention) is
saved whole as soon as one of them needs a gradient. Generated code of torch/csrc/autograd, from
tools/autograd/derivatives.yaml; seen with a dispatch-level meter on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zsim.autograd.aten.call import Call
from zsim.ir.ops import NORM_STEP

PRODUCTS = ("linear", "conv1d", NORM_STEP)
"""Operators with a call that multiplies by the weight: it saves one factor for the gradient of the
other. A fused norm is none."""


def needed(calls: Iterable[Call], *, needs: set[str], frozen: frozenset[str]) -> tuple[Call, ...]:
    """`calls` of one operator with what nobody needs left out; `needs`, the values that need a
    gradient, learns of new ones."""
    found = []
    for call in calls:
        call = _trimmed(call, needs=needs, frozen=frozen)
        if call.differentiable:
            needs.update((call.output, *call.also))
        found.append(call)
    return tuple(found)


def _trimmed(call: Call, *, needs: set[str], frozen: frozenset[str]) -> Call:
    own = call.parameters or call.weights
    trained = tuple(
        name for name in own if (name not in frozen if call.parameters else name in needs)
    )
    constant = own[:1] != trained[:1]  # the weight, which comes first
    wanting = tuple(value for value in call.inputs if value in needs)
    if not trained and not wanting:
        return replace(
            call,
            saves=(),
            gradients=(),
            passes=(),
            summed=(),
            parameters=(),
            weights=(),
            backward_scratch=(),
            differentiable=False,
        )
    if trained == own and wanting == call.inputs:
        return call
    makes = {*trained, *(call.inputs if call.joint else wanting)}
    weighted = call.operator in PRODUCTS and bool(own) and not call.keeps
    saves = call.saves
    if call.crossed:
        saves = tuple(
            value for value, other in zip(saves, saves[::-1], strict=True) if other in needs
        )
    elif weighted and constant:  # a weight of its own costs nothing, a copy of it does
        saves = tuple(value for value in saves if value in call.weights and wanting)
    halved = constant or (call.crossed and len(wanting) < len(call.inputs))
    return replace(
        call,
        saves=saves,
        gradients=tuple(name for name in call.gradients if name in makes),
        passes=tuple(name for name in call.passes if name in wanting),
        summed=tuple(item for item in call.summed if item[0] in makes),
        parameters=trained if call.parameters else (),
        weights=trained if call.weights else (),
        backward_scratch=() if call.parameters and not trained else call.backward_scratch,
        backward_flops=0 if constant and not wanting else call.backward_flops // (1 + halved),
        backward_moved=call.backward_moved // (1 + halved),
        packs=weighted and bool(wanting),
    )
