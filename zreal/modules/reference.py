"""The single-process reference: trains the whole model on the batches of all ranks."""

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
from zsim.models.spec import ModelSpec
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses and parameters of training on a single process, by fqn and in float32.

    AdamW divides by the size of a gradient, so an element whose gradient is mostly rounding error
    moves in a random direction. Every element of a key's bias does, since softmax cancels what is
    added to all scores of a query.
    """

    losses: tuple[float, ...]
    """Mean over ranks, by step."""
    initial: Mapping[str, Tensor]
    """Trained parameters before the first step."""
    parameters: Mapping[str, Tensor]
    """Trained parameters after the last step."""
    directionless: Mapping[str, Tensor] = field(default_factory=dict)
    """Masks of the elements whose gradient was mostly rounding error in some step."""
    untrained: Mapping[str, Tensor] = field(default_factory=dict)
    """Frozen or unused parameters, which training must leave as they are."""
    rounding: float = 0.0
    """Relative rounding of a parameter over all steps: the spacing of the stepped dtype per step.
    """


def reference(
    scenario: Scenario, *, steps: int, stepped_in: torch.dtype = torch.float32, device: str = "cpu"
) -> Reference:
    """Train `steps` steps on one process. Gradients are means over ranks and sums over
    micro-batches, as in every strategy.

    Parameters, gradients and optimizer are in `stepped_in`. For 2-byte precision with float32
    stepping, forward and backward run on a rounded copy. Training is on `device`; the result is in
    host memory.
    """
    master = modules.build(scenario.model, seed=scenario.seed).to(device, stepped_in)
    initial = _copies(scenario.model, master)
    optimizer = make_optimizer(scenario.optimizer, trained(master))
    noise = _Noise(scenario) if scenario.optimizer.name == "adamw" else None
    losses = []
    for step in range(steps):
        total = _backward(scenario, master, step=step, noise=noise)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total / (scenario.world_size * scenario.batch.accumulation))
    return Reference(
        losses=tuple(losses), initial=initial, parameters=_copies(scenario.model, master),
        directionless=_in_host_memory(noise.elements) if noise is not None else {},
        untrained={
            name: parameter.detach().cpu()
            for name, parameter in master.named_parameters()
            if name not in initial
        },
        rounding=steps * torch.finfo(stepped_in).eps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceGradients:
    """Gradients of one step on a single process, by fqn, and the norm of their possible rounding.

    A gradient sums the rounded contributions of ranks and micro-batches. Where these nearly cancel,
    rounding is as large as the sum. It is the dtype's relative rounding times the norms of all
    contributions.
    """

    whole: Mapping[str, Tensor]
    rounding: Mapping[str, float]


def gradients_at(
    scenario: Scenario, parameters: Mapping[str, Tensor], *, step: int, device: str = "cpu"
) -> ReferenceGradients:
    """The gradients of one process in `step` from the given parameters; those without one are
    omitted. They are made on `device` and returned in host memory."""
    model = modules.build(scenario.model, seed=scenario.seed).to(
        device, next(iter(parameters.values())).dtype
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name].reshape(parameter.shape))
    norms: dict[str, float] = {}
    _backward(scenario, model, step=step, norms=norms)
    share = torch.finfo(DTYPES[scenario.precision.narrowest]).eps / 2
    return ReferenceGradients(
        whole={
            name: parameter.grad.cpu()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
        rounding={name: share * size for name, size in norms.items()},
    )


def _backward(
    scenario: Scenario, master: modules.Model, *, step: int, noise: _Noise | None = None,
    norms: dict[str, float] | None = None,
) -> float:
    """Leave in `master` the gradients of one step of all ranks, clipped if the scenario clips.

    Returns the sum of the losses. `norms` receives the summed norms of the contributions to each
    gradient, clipped alike.
    """
    dtype = scenario.precision.parameters
    compute = (
        master
        if DTYPES[dtype] == next(master.parameters()).dtype
        else _rounded(scenario, master, dtype)
    )
    with _contribution_norms(compute, norms):
        total = _accumulate(scenario, compute, step=step, dtype=dtype)
    if noise is not None and (step == 0 or dtype != "float32"):
        noise.look(compute, step=step)
    if compute is not master:
        for exact, rounded in zip(master.parameters(), compute.parameters(), strict=True):
            exact.grad = None if rounded.grad is None else rounded.grad.float()
    if scenario.optimizer.clip_norm:
        whole = float(clip_grad_norm_(master.parameters(), scenario.optimizer.clip_norm))
        for name in norms or ():
            norms[name] *= min(1.0, scenario.optimizer.clip_norm / (whole or 1.0))  # type: ignore[index]
    return total


@contextmanager
def _contribution_norms(
    model: modules.Model, norms: dict[str, float] | None
) -> Iterator[None]:
    """Inside, each gradient that a backward makes adds its norm to its parameter's in `norms`."""
    if norms is None:
        yield
        return

    def add(name: str, gradient: Tensor) -> None:
        norms[name] = norms.get(name, 0.0) + float(gradient.detach().double().norm())

    handles = [
        parameter.register_hook(partial(add, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _accumulate(scenario: Scenario, model: modules.Model, *, step: int, dtype: str) -> float:
    """Accumulate the gradients of one step of all ranks; returns the sum of the losses."""
    total = 0.0
    for rank in range(scenario.world_size):
        device = str(next(model.parameters()).device)
        batches = batching.micro_batches(scenario, rank=rank, step=step, dtype=dtype, device=device)
        if next(model.parameters()).dtype == torch.float64:
            batches = [
                tuple(t.double() if t.is_floating_point() else t for t in batch)
                for batch in batches
            ]
            precision = replace(scenario.precision, autocast="none")
        else:
            precision = scenario.precision
        for forwards in batching.forwards_of(scenario, batches):
            with batching.autocast(precision, device=batches[0][0].device.type):
                loss = batching.summed_loss(model, forwards, spec=scenario.model)
            (loss / scenario.world_size).backward()
            total += loss.item()
    return total


class _Noise:
    """Masks of the elements whose gradient is off by more than half of its float64 value in some
    step."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.elements: dict[str, Tensor] = {}

    def look(self, model: modules.Model, *, step: int) -> None:
        """Compare the gradients of `model` with those of a copy in float64."""
        dtype = self.scenario.precision.parameters
        exact = _rounded(self.scenario, model, dtype).double()
        _accumulate(self.scenario, exact, step=step, dtype=dtype)
        pairs = zip(model.named_parameters(), exact.parameters(), strict=True)
        for (name, rounded), precise in pairs:
            if rounded.grad is not None and precise.grad is not None:
                error = (rounded.grad.double() - precise.grad).abs()
                mask = error > precise.grad.abs() / 2
                self.elements[name] = mask | self.elements.get(name, torch.zeros_like(mask))


def _copies(spec: ModelSpec, model: modules.Model) -> dict[str, Tensor]:
    trained = spec.trained
    named = model.named_parameters()
    return {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in named
        if name in trained
    }


def _in_host_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _rounded(scenario: Scenario, master: modules.Model, dtype: str) -> modules.Model:
    device = next(master.parameters()).device
    copy = modules.build(scenario.model, seed=scenario.seed, dtype=dtype).to(device)
    with torch.no_grad():
        for rounded, exact in zip(copy.parameters(), master.parameters(), strict=True):
            rounded.copy_(exact)
    return copy
