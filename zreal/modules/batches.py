"""The inputs of a step by rank and micro-batch, and the forwards and the loss over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from zreal.modules.initial_values import DTYPES, generator_of
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Precision
from zsim.scenario.scenario import Scenario

MicroBatch = tuple[Tensor, Tensor]


def inputs(
    spec: ModelSpec, batch: Batch, *, seed: int, rank: int, step: int, micro_batch: int,
    dtype: str = "float32",
) -> tuple[Tensor, Tensor]:
    """(x, targets) of one rank's micro-batch: they depend on seed, rank, step and micro-batch, not
    on the backend."""
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


def summed_loss(model: nn.Module, batches: Sequence[MicroBatch]) -> Tensor:
    """The sum of the losses of `model` on each of `batches`, one forward after another."""
    (x, targets), *more = batches
    loss = model(x, targets)
    for x, targets in more:
        loss = loss + model(x, targets)
    return cast(Tensor, loss)


def forwards_of(scenario: Scenario, batches: list[MicroBatch]) -> list[list[MicroBatch]]:
    """`batches` of a step by micro-batch: those whose forwards come before one backward."""
    size = scenario.batch.forwards
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def micro_batches(
    scenario: Scenario, *, rank: int, step: int, dtype: str, device: str = "cpu"
) -> list[MicroBatch]:
    """The inputs of all forwards of all micro-batches of one step, in order; floating-point ones in
    `dtype`."""
    found = (
        inputs(
            scenario.model, scenario.batch, seed=scenario.seed, rank=rank, step=step, micro_batch=i,
            dtype=dtype,
        )
        for i in range(scenario.batch.accumulation * scenario.batch.forwards)
    )
    return [(x.to(device), targets.to(device)) for x, targets in found]


def autocast(precision: Precision, *, device: str) -> AbstractContextManager[object]:
    """Around the forward of a whole micro-batch: torch.autocast with its cache of cast weights, or
    nothing."""
    if precision.autocast == "none":
        return nullcontext()
    return torch.autocast(
        torch.device(device).type, dtype=DTYPES[precision.autocast], cache_enabled=True
    )
