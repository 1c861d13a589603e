"""The single-process reference: trains the whole model on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zreal.modules import modules
from zreal.modules.initial_values import DTYPES
from zreal.modules.numerics import batches as batching
from zreal.modules.optimizers import make_optimizer, trained
from zreal.modules.rank_modules import RankModules
from zsim.models.spec import ModelSpec
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceGradients:
    """Gradients of one step on a single process, by fqn, and the norm of their possible rounding.

    A gradient sums the rounded contributions of ranks and micro-batches. Where these nearly cancel,
    rounding is as large as the sum. It is the dtype's relative rounding times the norms of all
    contributions.
    """

    whole: Mapping[str, Tensor]
    rounding: Mapping[str, float]


class SingleProcess:
    """Training of `scenario` on one process. Gradients are means over ranks and sums over
    micro-batches, as in every strategy.

    Parameters, gradients and optimizer are in `stepped_in`. For 2-byte precision with float32
    stepping, forward and backward run on rounded copies. Training is on `device`; results are in
    host memory. Before the micro-batches in `synchronised` every rank takes rank 0's buffers.
    """

    def __init__(
        self, scenario: Scenario, *, stepped_in: torch.dtype = torch.float32, device: str = "cpu",
        synchronised: Collection[int] = (),
    ) -> None:
        made = partial(
            RankModules, scenario=scenario, device=device, synchronised=synchronised
        )
        self.scenario, self._dtype = scenario, scenario.precision.parameters
        stepped = made(dtype=NAMES[stepped_in])
        self._master = stepped.first
        if STRATEGIES[scenario.strategy].masters_of_cast:
            for parameter in self._master.parameters():
                parameter.data.copy_(parameter.data.to(DTYPES[self._dtype]))
        self._ranks = stepped if DTYPES[self._dtype] == stepped_in else made(dtype=self._dtype)
        self._noise: _Noise | None = None
        if scenario.optimizer.name == "adamw":
            self._noise = _Noise(made(dtype=self._dtype, wide=True))
        self._step = 0

    def train(self, steps: int) -> Reference:
        """Train so many steps."""
        scenario, master = self.scenario, self._master
        initial, losses = _copies(scenario.model, master), list[float]()
        optimizer = make_optimizer(scenario.optimizer, trained(master))
        for self._step in range(steps):
            total = self._backward(noise=self._noise)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total / (scenario.world_size * scenario.batch.accumulation))
        self._step = steps
        noise, self._noise = self._noise, None
        return Reference(
            losses=tuple(losses), initial=initial, parameters=_copies(scenario.model, master),
            directionless={} if noise is None else {
                name: tensor.cpu() for name, tensor in noise.elements.items()
            },
            untrained={
                name: parameter.detach().cpu()
                for name, parameter in master.named_parameters()
                if name not in initial
            },
            rounding=steps * torch.finfo(next(master.parameters()).dtype).eps,
        )

    def gradients_at(
        self, parameters: Mapping[str, Tensor], *, buffers: Sequence[Sequence[Tensor]] = ()
    ) -> ReferenceGradients:
        """The gradients of the next step from the given parameters, and `buffers` by rank; those
        without one are omitted."""
        master = self._master
        self._ranks.take_buffers(buffers)
        with torch.no_grad():
            for name, parameter in master.named_parameters():
                parameter.copy_(parameters[name].reshape(parameter.shape))
        norms: dict[str, float] = {}
        self._backward(norms=norms)
        share = torch.finfo(DTYPES[self.scenario.precision.narrowest]).eps / 2
        return ReferenceGradients(
            whole={
                name: parameter.grad.cpu()
                for name, parameter in master.named_parameters()
                if parameter.grad is not None
            },
            rounding={name: share * size for name, size in norms.items()},
        )

    def _backward(
        self, *, noise: _Noise | None = None, norms: dict[str, float] | None = None
    ) -> float:
        """Leave in the master the gradients of one step of all ranks, clipped if the scenario
        clips.

        Returns the sum of the losses. `norms` receives the summed norms of the contributions to
        each gradient, clipped alike.
        """
        master, ranks, clip_norm = self._master, self._ranks, self.scenario.optimizer.clip_norm
        if ranks.first is not master:
            ranks.take(master)
        with _contribution_norms(ranks, norms):
            total = _accumulate(ranks, step=self._step)
        if noise is not None and (self._step == 0 or self._dtype != "float32"):
            noise.look(ranks.first, step=self._step)
        if ranks.first is not master:
            for exact, rounded in zip(
                master.parameters(), ranks.first.parameters(), strict=True
            ):
                exact.grad = None if rounded.grad is None else rounded.grad.float()
            ranks.first.zero_grad(set_to_none=True)
        if clip_norm:
            whole = float(clip_grad_norm_(master.parameters(), clip_norm))
            for name in norms or ():
                norms[name] *= min(1.0, clip_norm / (whole or 1.0))  # type: ignore[index]
        return total


@contextmanager
def _contribution_norms(ranks: RankModules, norms: dict[str, float] | None) -> Iterator[None]:
    """Inside, each gradient that a backward makes adds its norm to its parameter's in `norms`."""
    if norms is None:
        yield
        return

    def add(name: str, gradient: Tensor) -> None:
        norms[name] = norms.get(name, 0.0) + float(gradient.detach().double().norm())

    handles = [
        parameter.register_hook(partial(add, name))
        for model in ranks.each
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _accumulate(ranks: RankModules, *, step: int) -> float:
    """Accumulate the gradients of one step of all ranks; returns the sum of the losses."""
    scenario, total = ranks.scenario, 0.0
    precision = replace(scenario.precision, autocast="none") if ranks.wide else scenario.precision
    for rank in range(scenario.world_size):
        batches = batching.micro_batches(
            scenario, rank=rank, step=step, dtype=ranks.dtype, device=ranks.device
        )
        if ranks.wide:
            batches = [
                tuple(t.double() if t.is_floating_point() else t for t in batch)
                for batch in batches
            ]
        with ranks.of(rank) as model:
            for number, forwards in enumerate(batching.forwards_of(scenario, batches)):
                ranks.before_forward(rank, micro_batch=number)
                with batching.autocast(precision, device=batches[0][0].device.type):
                    loss = batching.summed_loss(model, forwards, spec=scenario.model)
                (loss / scenario.world_size).backward()
                total += loss.item()
    return total


class _Noise:
    """Masks of the elements whose gradient is off by more than half of its float64 value in some
    step, as `exact` computes it."""

    def __init__(self, exact: RankModules) -> None:
        self.exact = exact
        self.elements: dict[str, Tensor] = {}

    def look(self, model: modules.Model, *, step: int) -> None:
        """Compare the gradients of `model` with those of its parameters in float64."""
        self.exact.take(model)
        with _Float64WherePossible():
            _accumulate(self.exact, step=step)
        pairs = zip(model.named_parameters(), self.exact.first.parameters(), strict=True)
        for (name, rounded), precise in pairs:
            if rounded.grad is not None and precise.grad is not None:
                error = (rounded.grad.double() - precise.grad).abs()
                mask = error > precise.grad.abs() / 2
                self.elements[name] = mask | self.elements.get(name, torch.zeros_like(mask))
        # the float64 copy goes where it is that of the first step alone
        is_kept = self.exact.dtype != "float32"
        self.exact = self.exact if is_kept else replace(self.exact)


class _Float64WherePossible(TorchDispatchMode):
    """Runs in float32 the operators that refuse float64, alone or beside a cast of the module's own
    to float32."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if func._schema.is_mutable:
                raise
            args, kwargs = _cast((args, kwargs), torch.float64, torch.float32)
            return _cast(func(*args, **kwargs), torch.float32, torch.float64)


def _cast(tree: Any, dtype: torch.dtype, other: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(other) if t.dtype == dtype else t, tree)


def _copies(spec: ModelSpec, model: modules.Model) -> dict[str, Tensor]:
    trained = spec.trained
    named = model.named_parameters()
    return {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in named
        if name in trained
    }
