"""Optimizers of torch.optim by the scenario's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zsim.models.training_options import Optimizer

EPSILON = 1e-6
"""AdamW's eps. A gradient that is zero but for rounding, as that of a key's bias, stays far below
it. Parity then compares training, not the signs of rounding errors. Bytes and time are the same."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer steps: those that need a gradient."""
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


def cast_into(settings: Optimizer, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy `sources` into `targets` of another dtype, in one call or in a for-loop."""
    if settings.implementation == "for-loop":
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(list(targets), list(sources))


def set_gradients(
    settings: Optimizer, tensors: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Set the gradients of the stepped `tensors`, cast where these are master copies."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient if gradient.dtype == tensor.dtype else torch.empty_like(tensor)
    casts = [
        (tensor.grad, gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if tensor.grad is not gradient
    ]
    if casts:
        cast_into(
            settings, [exact for exact, _ in casts if exact is not None],
            [gradient for _, gradient in casts],
        )


def write_back(
    settings: Optimizer, parameters: Sequence[Tensor], tensors: Sequence[Tensor]
) -> None:
    """Drop the gradients of `tensors`, and cast stepped master copies into their `parameters`."""
    for tensor in tensors:
        tensor.grad = None
    casts = [
        (parameter, tensor)
        for parameter, tensor in zip(parameters, tensors, strict=True)
        if parameter.dtype != tensor.dtype
    ]
    if casts:
        cast_into(settings, [parameter for parameter, _ in casts], [tensor for _, tensor in casts])


def expected_step(
    settings: Optimizer,
    tensors: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    *,
    states: Mapping[Tensor, Mapping[str, Any]],
) -> dict[str, Tensor]:
    """Copies of `tensors` after one step of a new optimizer from the same gradients and `states`.
    """
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    optimizer = make_optimizer(settings, list(copies.values()))
    for name, copy in copies.items():
        gradient = gradients[name]
        copy.grad = None if gradient is None else gradient.detach().to(copy.dtype, copy=True)
        state = states.get(tensors[name])
        if state:
            optimizer.state[copy] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in state.items()
            }
    optimizer.step()
    return copies


def largest_difference(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest absolute difference of any element; infinite where a tensor is missing or not finite.
    """
    if measured.keys() != expected.keys():
        return math.inf
    differences = [
        (tensor.detach().cpu().double() - expected[name].detach().cpu().double()).abs()
        for name, tensor in measured.items()
    ]
    if any(bool(difference.isnan().any()) for difference in differences):
        return math.inf
    largest = max((float(each.max()) for each in differences if each.numel()), default=0.0)
    return largest if math.isfinite(largest) else math.inf
