"""A user's module traced on the inputs of its first forward, as the input of a strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zreal.tracing.trace import trace
from zreal.tracing.units.param_groups import UnitChoice
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.traced.model import TracedModel
from zsim.errors import ArgumentError
from zsim.models.training_options import (
    ON_DEVICE,
    Device,
    Dtype,
    Offload,
    Optimizer,
    Precision,
)
from zsim.strategies.building.training import Training
from zsim.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The part of a scenario that flat buffers follow, of a module that no scenario names."""

    model: TracedModel
    options: Any
    precision: Precision
    optimizer: Optimizer
    offload: Offload = ON_DEVICE

    @property
    def gradient_dtype(self) -> Dtype:
        """The dtype of kept gradients, which is that of parameters."""
        return self.precision.parameters


def traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, units: UnitChoice,
    loss: Callable[[Any], Tensor] | None, device: Device,
    tracing: Callable[[], AbstractContextManager[None]],
) -> TracedModel:
    """The model of one training step, also where the caller is evaluating or in autocast.

    ArgumentError in autocast on CUDA, in which no GPU has run this yet.
    """
    autocast = autocast_on(device)
    if device == "cuda" and autocast != "none":
        raise ArgumentError(
            where="the training loop", expected="a forward without torch.autocast on CUDA",
            found=f"one in {autocast}",
            remedy="cast the module, as by .bfloat16(), before its optimizer is made",
        )
    evaluates = not module.training
    try:
        if evaluates:
            module.train()
        with tracing(), torch.autocast(device, enabled=False), torch.enable_grad():
            return trace(
                module, _inputs(module, args, kwargs), units=units, device=device,
                casts_input=False, loss=loss, autocast=autocast,
            )
    finally:
        if evaluates:
            module.eval()


def autocast_on(device: Device) -> Any:
    """The dtype of the torch.autocast that the caller is in, or "none"."""
    if not torch.is_autocast_enabled(device):
        return "none"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inputs as the tracer takes them: all by position, or all by name."""
    if not kwargs:
        return args
    if not args:
        return kwargs
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def training_of(
    settings: Settings, *, strategy: Strategy, accumulation: int,
    sync: Literal["every", "last"], device: Device,
) -> Training:
    """The input of `strategy` for steps of `accumulation` micro-batches."""
    model = settings.model
    batch = replace(model.batch, accumulation=accumulation)
    return Training(
        model=model,
        modules=lower(
            model, batch=batch, dtype=model.dtype, device=device, autocast=model.autocast,
            unit_hooks=strategy.unit_hooks,
        ),
        batch=batch, precision=settings.precision, optimizer=settings.optimizer, sync=sync,
        device=device,
    )
