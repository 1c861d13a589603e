"""Parity: differences of a real run's parameters and gradients to the single-process reference."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from zreal.modules.reference import Gradients, Reference


def largest(differences: Mapping[str, float]) -> tuple[float, str]:
    """The largest difference and whose it is; 0 and nobody's where there are none."""
    name = max(differences, key=lambda one: (differences[one], one), default="")
    return differences.get(name, 0.0), name


def relative_differences(found: Mapping[str, Tensor], reference: Reference) -> dict[str, float]:
    """By parameter ‖found − reference‖ relative to how far training moved the reference.

    An untrained parameter is thus 1 away. One that the reference hardly moves is measured by what
    an average element of the model moves instead, and one that moves by less than its dtype rounds,
    as with small steps without a master copy, by that rounding. A directionless element may end up
    wherever random steps take it, thus no farther from the reference than twice the farthest that
    any element moved. Where nothing moves, as with a learning rate of 0, equal is 0 and anything
    else infinite; so is a parameter that is missing or not finite, or an untrained one that is not
    bit by bit what it was.
    """
    expected, untrained = reference.parameters, reference.untrained
    if other := set(found) ^ {*expected, *untrained}:
        return dict.fromkeys(other, math.inf)
    changed = [
        name
        for name, was in untrained.items()
        if not torch.equal(found[name].cpu().reshape(was.shape), was.to(found[name].dtype))
    ]
    if changed:
        return dict.fromkeys(changed, math.inf)
    moved = {
        name: float((want - reference.initial[name]).norm()) for name, want in expected.items()
    }
    average = math.sqrt(
        sum(one**2 for one in moved.values()) / sum(want.numel() for want in expected.values())
    )
    farthest = max(
        float((want - reference.initial[name]).abs().max()) for name, want in expected.items()
    )
    differences = {}
    for name, want in expected.items():
        difference = found[name].detach().float().cpu().reshape(want.shape) - want
        random = reference.directionless.get(name)
        if random is not None:
            difference = difference.masked_fill(random & (difference.abs() <= 2 * farthest), 0.0)
        apart = float(difference.norm())
        scale = max(moved[name], average * math.sqrt(want.numel()))
        if scale:
            scale = max(scale, reference.rounding * float(want.norm()))
        relative = apart / scale if scale else math.inf if apart else 0.0
        differences[name] = relative if math.isfinite(relative) else math.inf
    return differences


def gradient_differences(found: Mapping[str, Tensor], expected: Gradients) -> dict[str, float]:
    """By parameter ‖found − expected‖, less what rounding may do, relative to ‖expected‖; where
    there is no gradient, it is zero.

    A gradient smaller than that of an average element of the model, as the bias of keys has, is
    measured by that average.
    """
    norms = {name: float(want.double().norm()) for name, want in expected.whole.items()}
    numel = sum(want.numel() for want in expected.whole.values())
    average = math.sqrt(sum(norm**2 for norm in norms.values()) / numel) if numel else 0.0
    differences = {}
    for name in found.keys() | expected.whole.keys():
        mine, want = found.get(name), expected.whole.get(name)
        known = mine if mine is not None else want
        assert known is not None
        zero = torch.zeros(known.numel(), dtype=torch.float64)
        mine, want = (
            zero if one is None else one.detach().cpu().double().flatten() for one in (mine, want)
        )
        apart = float((mine - want).norm()) - expected.rounding.get(name, 0.0)
        apart = max(0.0, apart) if math.isfinite(apart) else math.inf
        scale = max(norms.get(name, 0.0), average * math.sqrt(known.numel()))
        relative = apart / scale if scale else math.inf if apart else 0.0
        differences[name] = relative if math.isfinite(relative) else math.inf
    return differences
