"""torch.optim by the scenario's words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zsim.models.training_options import Optimizer

EPSILON = 1e-6
"""AdamW's eps. A gradient that is zero but for rounding (that of a key's bias, which softmax
cancels) stays far below it, so that parity compares training and not the signs of rounding errors.
It changes neither bytes nor time."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer is given: those that need a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(
    settings: Optimizer, parameters: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """AdamW or SGD over `parameters`, with the implementation that the scenario names."""
    foreach, fused = settings.implementation == "foreach", settings.implementation == "fused"
    if settings.name == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            eps=EPSILON,
            weight_decay=settings.weight_decay,
            foreach=foreach,
            fused=fused,
        )
    return torch.optim.SGD(
        parameters,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        foreach=foreach,
        fused=fused,
    )


def cast_to(settings: Optimizer, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy `sources` into `targets` of another dtype: in one call, or by for-loop one by one."""
    if settings.implementation == "for-loop":
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(list(targets), list(sources))


def hand_over(settings: Optimizer, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Give `tensors`, which are stepped, their gradients: themselves, or cast to the dtype of
    master copies."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient if gradient.dtype == tensor.dtype else torch.empty_like(tensor)
    casts = [
        (tensor.grad, gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if tensor.grad is not gradient
    ]
    if casts:
        cast_to(
            settings, [exact for exact, _ in casts if exact is not None],
            [gradient for _, gradient in casts],
        )


def hand_back(settings: Optimizer, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Let the gradients of `tensors` go, and cast stepped master copies into their `parameters`."""
    for tensor in tensors:
        tensor.grad = None
    casts = [
        (parameter, tensor)
        for parameter, tensor in zip(parameters, tensors, strict=True)
        if parameter.dtype != tensor.dtype
    ]
    if casts:
        cast_to(settings, [parameter for parameter, _ in casts], [tensor for _, tensor in casts])


def stepped_again(
    settings: Optimizer,
    tensors: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    *,
    states: Mapping[Tensor, Mapping[str, Any]],
) -> dict[str, Tensor]:
    """What a new optimizer makes of copies of `tensors`, from copies of the same gradients and
    `states`, in one step."""
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    again = make_optimizer(settings, list(copies.values()))
    for name, copy in copies.items():
        gradient = gradients[name]
        copy.grad = None if gradient is None else gradient.detach().to(copy.dtype, copy=True)
        state = states.get(tensors[name])
        if state:
            again.state[copy] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in state.items()
            }
    again.step()
    return copies


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest absolute difference of any element; infinite where a tensor is missing or a
    difference is no number."""
    if found.keys() != expected.keys():
        return math.inf
    apart = [
        (mine.detach().cpu().double() - expected[name].detach().cpu().double()).abs()
        for name, mine in found.items()
    ]
    largest = max((float(one.max()) for one in apart if one.numel()), default=0.0)
    return (
        largest
        if math.isfinite(largest) and not any(bool(one.isnan().any()) for one in apart)
        else math.inf
    )
