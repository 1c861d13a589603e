"""Inputs of a step by rank and micro-batch, and the loss over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from zreal.modules.initial_values import DTYPES, generator_of
from zreal.modules.own.own_module import OwnModel
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Precision
from zsim.scenario.scenario import Scenario

MicroBatch = tuple[Tensor, ...]
"""Inputs (batch, sequence) of tokens or (batch, features) of numbers, and their targets; or the
inputs of a user's own module."""


def inputs(
    spec: ModelSpec, batch: Batch, *, seed: int, rank: int, step: int, micro_batch: int,
    dtype: str = "float32",
) -> MicroBatch:
    """The micro-batch of one rank. It depends on seed, rank, step and micro-batch, never on the
    backend."""
    if isinstance(spec, OwnModel):
        return spec.own.batch(seed, rank, step, micro_batch, dtype=dtype)
    generator = generator_of(seed, rank, step, micro_batch)
    classes = spec.modules[-1].operators[-1].out_features
    if spec.family == "mlp":
        width = spec.first_operator.in_features
        x = torch.randn(batch.micro_batch, width, generator=generator).to(DTYPES[dtype])
        return x, torch.randint(classes, (batch.micro_batch,), generator=generator)
    tokens = torch.randint(
        classes, (batch.micro_batch, batch.sequence_length + 1), generator=generator
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def summed_loss(
    model: nn.Module, batches: Sequence[MicroBatch], *, spec: ModelSpec | None = None
) -> Tensor:
    """Sum of the losses of `model` over `batches`, one forward after another; `spec` knows the loss
    of a user's own module."""
    first, *more = batches
    loss = _loss(model, first, spec)
    for batch in more:
        loss = loss + _loss(model, batch, spec)
    return loss


def _loss(model: nn.Module, batch: MicroBatch, spec: ModelSpec | None) -> Tensor:
    if isinstance(spec, OwnModel):
        return spec.own.loss_of(model, batch)
    return cast(Tensor, model(*batch))


def forwards_of(scenario: Scenario, batches: list[MicroBatch]) -> list[list[MicroBatch]]:
    """The batches of a step grouped by micro-batch: the forwards before each backward."""
    size = scenario.batch.forwards
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def micro_batches(
    scenario: Scenario, *, rank: int, step: int, dtype: str, device: str = "cpu"
) -> list[MicroBatch]:
    """The inputs of all forwards of one step, in order; floating-point ones in `dtype`."""
    batches = (
        inputs(
            scenario.model, scenario.batch, seed=scenario.seed, rank=rank, step=step, micro_batch=i,
            dtype=dtype,
        )
        for i in range(scenario.batch.accumulation * scenario.batch.forwards)
    )
    return [tuple(tensor.to(device) for tensor in batch) for batch in batches]


def inputs_by_step(
    scenario: Scenario, *, rank: int, dtype: str, device: str
) -> Callable[[int], list[MicroBatch]]:
    """`micro_batches` as a function of the step alone."""
    return lambda step: micro_batches(scenario, rank=rank, step=step, dtype=dtype, device=device)


def autocast(precision: Precision, *, device: str) -> AbstractContextManager[object]:
    """Context around the forward of a micro-batch: torch.autocast with its weight cache, or
    nothing."""
    if precision.autocast == "none":
        return nullcontext()
    return torch.autocast(
        torch.device(device).type, dtype=DTYPES[precision.autocast], cache_enabled=True
    )
