"""The single-process reference: the whole model on the batches of all ranks, and how far from it
parameters end up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from zreal.modules import batches as batching
from zreal.modules import modules
from zreal.modules.initial_values import DTYPES
from zreal.modules.optimizers import make_optimizer, trained
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Mean loss over ranks of each step, and every trained parameter before the first and after the
    last, in float32.

    `directionless` marks, by parameter, the elements whose gradient was more rounding error than
    gradient in some step. All of the bias of keys are: softmax does not see what is added to every
    score of a query. AdamW divides by the gradient's size and so steps them at random. `untrained`
    are the parameters, frozen or never used, that training must leave as they are.
    """

    losses: tuple[float, ...]
    initial: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    directionless: Mapping[str, Tensor] = field(default_factory=dict)
    untrained: Mapping[str, Tensor] = field(default_factory=dict)
    rounding: float = 0.0
    """What share of its size a parameter may have been rounded by in all steps together: the
    spacing of the stepped dtype, per step."""


def reference(
    scenario: Scenario, *, steps: int, stepped_in: torch.dtype = torch.float32
) -> Reference:
    """Train on one process: gradients are means over ranks and sums over micro-batches, as every
    strategy makes them.

    Parameters, gradients and optimizer are in `stepped_in`; where that is float32 and the precision
    has 2 bytes, the forward and backward run on a rounded copy.
    """
    master = modules.build(scenario.model, seed=scenario.seed).to(stepped_in)
    initial = _copies(master)
    optimizer = make_optimizer(scenario.optimizer, trained(master))
    noise = _Noise(scenario) if scenario.optimizer.name == "adamw" else None
    losses = []
    for step in range(steps):
        total = _backward(scenario, master, step=step, noise=noise)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total / (scenario.world_size * scenario.batch.accumulation))
    return Reference(
        losses=tuple(losses), initial=initial, parameters=_copies(master),
        directionless=noise.elements if noise is not None else {},
        untrained={
            name: parameter.detach()
            for name, parameter in master.named_parameters()
            if name not in initial
        },
        rounding=steps * torch.finfo(stepped_in).eps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What an optimizer of one process is handed, by parameter, and by how much rounding may have
    moved each.

    A gradient is the sum of what ranks and micro-batches make of it, each of which is rounded by
    itself: where they nearly cancel, what rounding leaves is as large as the sum. `rounding` is the
    share by which the dtype of compute rounds, of the sizes of all parts.
    """

    whole: Mapping[str, Tensor]
    rounding: Mapping[str, float]


def gradients_at(scenario: Scenario, parameters: Mapping[str, Tensor], *, step: int) -> Gradients:
    """The gradients of one process in `step` if every parameter of the model is as given; those
    without one are left out."""
    model = modules.build(scenario.model, seed=scenario.seed).to(
        next(iter(parameters.values())).dtype
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name].reshape(parameter.shape))
    parts: dict[str, float] = {}
    _backward(scenario, model, step=step, parts=parts)
    share = torch.finfo(DTYPES[scenario.precision.narrowest]).eps / 2
    return Gradients(
        whole={
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
        rounding={name: share * size for name, size in parts.items()},
    )


def _backward(
    scenario: Scenario, master: modules.Model, *, step: int, noise: _Noise | None = None,
    parts: dict[str, float] | None = None,
) -> float:
    """Leave in `master` the gradients of one step of all ranks, clipped if the scenario says so;
    returns the sum of the losses.

    `parts` learns of the sizes of what they are sums of, clipped alike.
    """
    dtype = scenario.precision.parameters
    compute = (
        master
        if DTYPES[dtype] == next(master.parameters()).dtype
        else _rounded(scenario, master, dtype)
    )
    with _sizes(compute, parts):
        total = _accumulate(scenario, compute, step=step, dtype=dtype)
    if noise is not None and (step == 0 or dtype != "float32"):
        noise.look(compute, step=step)
    if compute is not master:
        for mine, theirs in zip(master.parameters(), compute.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.float()
    if scenario.optimizer.clip_norm:
        whole = float(clip_grad_norm_(master.parameters(), scenario.optimizer.clip_norm))
        for name in parts or ():
            parts[name] *= min(1.0, scenario.optimizer.clip_norm / (whole or 1.0))  # type: ignore[index]
    return total


@contextmanager
def _sizes(model: modules.Model, parts: dict[str, float] | None) -> Iterator[None]:
    """Adds the size of each gradient that a backward inside makes to that of its parameter."""

    def add(name: str, gradient: Tensor) -> None:
        assert parts is not None
        parts[name] = parts.get(name, 0.0) + float(gradient.detach().double().norm())

    named = (
        [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        if parts is not None
        else []
    )
    handles = [parameter.register_hook(partial(add, name)) for name, parameter in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _accumulate(scenario: Scenario, model: modules.Model, *, step: int, dtype: str) -> float:
    """The gradients of one step of all ranks; returns the sum of the losses."""
    total = 0.0
    for rank in range(scenario.world_size):
        batches = batching.micro_batches(scenario, rank=rank, step=step, dtype=dtype)
        if next(model.parameters()).dtype == torch.float64:
            batches = [
                (x.double() if x.is_floating_point() else x, targets) for x, targets in batches
            ]
            precision = replace(scenario.precision, autocast="none")
        else:
            precision = scenario.precision
        for forwards in batching.forwards_of(scenario, batches):
            with batching.autocast(precision, device=batches[0][0].device.type):
                loss = batching.summed_loss(model, forwards)
            (loss / scenario.world_size).backward()
            total += loss.item()
    return total


class _Noise:
    """Finds the elements whose gradient, in some step, is farther from its value in float64 than
    half of that value."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.elements: dict[str, Tensor] = {}

    def look(self, model: modules.Model, *, step: int) -> None:
        """Compare the gradients that `model` has with those of a copy in float64."""
        dtype = self.scenario.precision.parameters
        exact = _rounded(self.scenario, model, dtype).double()
        _accumulate(self.scenario, exact, step=step, dtype=dtype)
        for (name, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
            if mine.grad is not None and theirs.grad is not None:
                mask = (mine.grad.double() - theirs.grad).abs() > theirs.grad.abs() / 2
                self.elements[name] = mask | self.elements.get(name, torch.zeros_like(mask))


def _copies(model: modules.Model) -> dict[str, Tensor]:
    trained = model.spec.trained
    named = model.named_parameters()
    return {
        name: parameter.detach().float().clone() for name, parameter in named if name in trained
    }


def _rounded(scenario: Scenario, master: modules.Model, dtype: str) -> modules.Model:
    copy = modules.build(scenario.model, seed=scenario.seed, dtype=dtype)
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), master.parameters(), strict=True):
            mine.copy_(theirs)
    return copy
