"""Parity: differences of a real run's parameters and gradients to the single-process reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zreal.modules.numerics.reference import Reference, ReferenceGradients


def largest(differences: Mapping[str, float]) -> tuple[float, str]:
    """The largest difference and its parameter; 0 and "" where there are none."""
    name = max(differences, key=lambda each: (differences[each], each), default="")
    return differences.get(name, 0.0), name


def relative_differences(
    parameters: Mapping[str, Tensor], reference: Reference
) -> dict[str, float]:
    """‖parameter − reference‖ relative to ‖the reference's movement‖, by parameter.

    An untrained parameter is thus 1 away. The scale is at least the movement of an average element
    of the model, and at least what the dtype rounds. A directionless element may end anywhere
    within twice the largest movement of any element.

    Infinite for a parameter that is missing, not finite, or untrained and changed in any bit. Where
    nothing moves, as with a learning rate of 0, equal is 0 and anything else infinite.
    """
    expected, untrained = reference.parameters, reference.untrained
    if mismatched := set(parameters) ^ {*expected, *untrained}:
        return dict.fromkeys(mismatched, math.inf)
    if changed := [name for name in untrained if _differs(parameters[name], untrained[name])]:
        return dict.fromkeys(changed, math.inf)
    movements = {name: want - reference.initial[name] for name, want in expected.items()}
    moved = {name: float(movement.norm()) for name, movement in movements.items()}
    average = _root_mean_square(moved.values(), sum(want.numel() for want in expected.values()))
    farthest = max(float(movement.abs().max()) for movement in movements.values())
    differences = {}
    for name, want in expected.items():
        difference = parameters[name].detach().float().cpu().reshape(want.shape) - want
        random = reference.directionless.get(name)
        if random is not None:
            difference = difference.masked_fill(random & (difference.abs() <= 2 * farthest), 0.0)
        scale = max(moved[name], average * math.sqrt(want.numel()))
        if scale:
            scale = max(scale, reference.rounding * float(want.norm()))
        differences[name] = _relative(float(difference.norm()), scale)
    return differences


def gradient_differences(
    gradients: Mapping[str, Tensor], expected: ReferenceGradients
) -> dict[str, float]:
    """‖gradient − expected‖, less possible rounding, relative to ‖expected‖, by parameter.

    A missing gradient counts as zero. The scale is at least the gradient of an average element of
    the model, as that of a key's bias is smaller.
    """
    norms = {name: float(want.double().norm()) for name, want in expected.whole.items()}
    average = _root_mean_square(
        norms.values(), sum(want.numel() for want in expected.whole.values())
    )
    differences = {}
    for name in gradients.keys() | expected.whole.keys():
        measured, want = gradients.get(name), expected.whole.get(name)
        known = measured if measured is not None else want
        assert known is not None
        zero = torch.zeros(known.numel(), dtype=torch.float64)
        measured, want = (
            zero if gradient is None else gradient.detach().cpu().double().flatten()
            for gradient in (measured, want)
        )
        distance = float((measured - want).norm()) - expected.rounding.get(name, 0.0)
        distance = max(0.0, distance) if math.isfinite(distance) else math.inf
        scale = max(norms.get(name, 0.0), average * math.sqrt(known.numel()))
        differences[name] = _relative(distance, scale)
    return differences


def _root_mean_square(norms: Iterable[float], numel: int) -> float:
    """Size of an average element of tensors with these norms and `numel` elements together."""
    return math.sqrt(sum(norm**2 for norm in norms) / numel) if numel else 0.0


def _differs(parameter: Tensor, initial: Tensor) -> bool:
    """True where any bit of a parameter differs from its initial value in the same dtype."""
    return not torch.equal(parameter.cpu().reshape(initial.shape), initial.to(parameter.dtype))


def _relative(distance: float, scale: float) -> float:
    relative = distance / scale if scale else math.inf if distance else 0.0
    return relative if math.isfinite(relative) else math.inf
