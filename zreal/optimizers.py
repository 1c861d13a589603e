"""torch.optim by the scenario's words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zsim.training import Optimizer

EPSILON = 1e-6
"""AdamW's eps. A gradient that is zero but for rounding (that of a key's bias, which softmax cancels) stays far below it, so that
parity compares training and not the signs of rounding errors. It changes neither bytes nor time."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer is given: those that need a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(settings: Optimizer, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
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
