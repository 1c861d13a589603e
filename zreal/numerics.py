"""The single-process reference: the whole model on the batches of all ranks, and how far parameters are from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zreal import modules
from zreal.optimizers import make_optimizer
from zsim.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Mean loss over ranks of each step, and every parameter after the last, in float32."""

    losses: tuple[float, ...]
    parameters: Mapping[str, Tensor]


def reference(scenario: Scenario, *, steps: int) -> Reference:
    """Train on one process: gradients are means over ranks and sums over micro-batches, as every strategy makes them.

    Parameters, gradients and optimizer are float32; with 2-byte precision the forward and backward run on a rounded copy.
    """
    master = modules.build(scenario.model, seed=scenario.seed)
    dtype = scenario.precision.parameters
    optimizer = make_optimizer(scenario.optimizer, list(master.parameters()))
    losses = []
    for step in range(steps):
        compute = master if dtype == "float32" else _rounded(scenario, master, dtype)
        total = 0.0
        for rank in range(scenario.world_size):
            for x, targets in modules.micro_batches(scenario, rank=rank, step=step, dtype=dtype):
                loss = compute(x, targets)
                (loss / scenario.world_size).backward()
                total += loss.item()
        if compute is not master:
            for mine, theirs in zip(master.parameters(), compute.parameters(), strict=True):
                mine.grad = None if theirs.grad is None else theirs.grad.float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total / (scenario.world_size * scenario.batch.accumulation))
    parameters = {name: parameter.detach().clone() for name, parameter in master.named_parameters()}
    return Reference(losses=tuple(losses), parameters=parameters)


def _rounded(scenario: Scenario, master: modules.Model, dtype: str) -> modules.Model:
    copy = modules.build(scenario.model, seed=scenario.seed, dtype=dtype)
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), master.parameters(), strict=True):
            mine.copy_(theirs)
    return copy


def largest_relative_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest over parameters of ‖found − expected‖ / ‖expected‖; infinite when a parameter is missing or not finite."""
    if set(found) != set(expected):
        return float("inf")
    largest = 0.0
    for name, want in expected.items():
        have = found[name].detach().float().cpu().reshape(want.shape)
        difference = ((have - want).norm() / want.norm().clamp_min(1e-12)).item()
        largest = max(largest, difference) if difference == difference else float("inf")
    return largest
