"""One forward and one backward of a module on fake tensors, watched: what zreal.tracing.trace makes
a model of. It knows no model."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zreal import torch_private
from zreal.modules.numerics import batches
from zreal.tracing.errors import UntraceableError, refuse
from zreal.tracing.fake_module import Faked
from zreal.tracing.fakes.known_values import as_on_real_tensors
from zreal.tracing.gradients.engine_sums import Lives, merged
from zreal.tracing.gradients.parameter_gradients import ParameterGradients
from zreal.tracing.module_values import cast_floats, tensors_in
from zreal.tracing.storage_log import Born, Place, StorageLog
from zreal.tracing.units.sharded_dtypes import ShardedDtypes
from zreal.tracing.units.unit_hooks import Boundaries
from zsim.autograd.lowered import UnitHooks
from zsim.io.units import format_bytes
from zsim.models.training_options import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """The record of a step; `left` is what the module keeps of it, `loss` the storages of the
    loss's gradient and of the loss."""

    boundaries: Boundaries
    gradients: ParameterGradients
    lives: Lives
    reads: dict[Place, dict[str, None]]
    left: dict[int, Born]
    loss: tuple[int, int]
    cast_inputs: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWatcher:
    """Runs steps of a module under `log`, with the hooks of a strategy on its units."""

    step: Faked
    log: StorageLog
    loss: Callable[[Any], Tensor] | None
    casts: Precision
    sums_in_place: bool
    unit_hooks: UnitHooks

    def steady(self) -> tuple[WatchedStep, int]:
        """A step as all later ones are, and the bytes that the module keeps from its first one."""
        step, log = self.step, self.log
        for fqn, parameter in step.parameters.items():
            log.ignore(parameter, parameter=fqn)
        for tensor in (*step.buffers.values(), *tensors_in((step.args, step.kwargs))):
            log.ignore(tensor)
        run = self._run()
        held = sum(born.nbytes for born in run.left.values())
        if held:  # what the first forward has left in the module is there in the second
            run = self._run()
            _require_nothing_left(run.left)
        return run, held

    def _run(self) -> WatchedStep:
        """One forward and backward. Garbage collection waits for the end, so that it frees nothing
        at random."""
        step, log = self.step, self.log
        boundaries = Boundaries(
            log, model=step.model, units=step.units, dtype=step.cast, unit_hooks=self.unit_hooks
        )
        gradients = ParameterGradients(log)
        versions = {fqn: torch_private.version(p) for fqn, p in step.parameters.items()}
        to = None if self.unit_hooks == "raw_inputs" else step.cast
        collects = gc.isenabled()
        gc.disable()
        try:
            with (
                boundaries.hooks(), gradients.hooks(step.parameters),
                _root_cast(step, log, to=to) as cast_inputs, as_on_real_tensors(), step.in_place(),
                ShardedDtypes(() if to is None else step.groups, step.parameters, boundaries), log,
            ):
                numbers = self._forward_backward(boundaries, gradients)
        finally:
            if collects:
                gc.enable()
        boundaries.end_backward()
        gc.collect()
        self._require_unwritten(versions)
        lives, reads = merged(log.entries, in_place=self.sums_in_place), log.reads
        for parameter in step.parameters.values():
            if parameter.grad is not None:
                log.ignore(parameter.grad)
            parameter.grad = None
        return WatchedStep(
            boundaries=boundaries, gradients=gradients, lives=lives, reads=reads,
            left=log.restart(), loss=numbers, cast_inputs=cast_inputs,
        )

    def _require_unwritten(self, versions: Mapping[str, int]) -> None:
        """UntraceableError for a parameter that forward changes in place; autograd, and the count
        of its changes, do not see what is done to its `.data`."""
        for fqn, operator in self.log.writes.items():
            if torch_private.version(self.step.parameters[fqn]) != versions[fqn]:
                raise refuse(
                    fqn, "a parameter that forward does not change", f"{operator} of it in place",
                    "change its .data, which autograd does not see",
                )

    def _forward_backward(
        self, boundaries: Boundaries, gradients: ParameterGradients
    ) -> tuple[int, int]:
        """The numbers of the storages of the loss's gradient and of the loss, which are dropped
        last and in this order."""
        step, log, casts = self.step, self.log, self.casts
        try:
            if casts.autocast != "none":
                # torch does so only at the end of the outermost autocast, which may be the caller's
                torch.clear_autocast_cache()
            with batches.autocast(casts, device="cpu"):
                result = (self.loss or _default_loss)(step.model(*step.args, **step.kwargs))
                if casts.autocast != "none":
                    boundaries.leave_autocast()
            if casts.autocast != "none":
                torch.clear_autocast_cache()
            if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
                problem = (
                    "one without a gradient"
                    if isinstance(result, Tensor) and result.numel() == 1
                    else f"a tensor of shape {tuple(result.shape)}"
                    if isinstance(result, Tensor)
                    else type(result).__name__
                )
                raise refuse(
                    "loss", "one number that depends on the parameters", problem,
                    "give a loss, a function of the output",
                )
            boundaries.begin_backward(result)
            gradients.follow(result, step.parameters)
            with torch.no_grad():
                seed = torch.ones_like(result)
            numbers = log.number(seed), log.number(result)
            # not hidden from KernelChoices where it recomputes
            torch_private.run_backward(result, seed)
        except UntraceableError:
            raise
        except Exception as error:  # whatever a user's module may raise
            lines = str(error).strip().splitlines() or [""]
            problem = f"{type(error).__name__}: {lines[0][:200]}"
            raise refuse(
                _where(boundaries), "a module that runs on these inputs", problem, ""
            ) from error
        del seed
        del result
        return numbers


def _where(boundaries: Boundaries) -> str:
    return next(iter(boundaries.visits[boundaries.log.place.stretch :]), boundaries.visits[0]).unit


def _default_loss(output: Any) -> Tensor:
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if not isinstance(output, Tensor):
        problem = f"an output of type {type(output).__name__} without a loss"
        raise refuse(
            "loss", "a tensor, or an output with .loss", problem,
            "give a loss, a function of the output",
        )
    return output if output.numel() == 1 else output.float().sum()


@contextmanager
def _root_cast(step: Faked, log: StorageLog, *, to: torch.dtype | None) -> Iterator[list[int]]:
    """The model's own inputs cast `to` a dtype when it is called, as the root of fully_shard does;
    the storages of what was cast."""
    casts: list[int] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
        cast = cast_floats((args, kwargs), to)
        casts.extend(log.number(tensor) for tensor in tensors_in(cast) if id(tensor) not in inputs)
        return cast

    handle = step.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    try:
        yield casts
    finally:
        handle.remove()


def _require_nothing_left(left: Mapping[int, Born]) -> None:
    if left:
        counts = Counter(born.operator for born in left.values())
        operator, _ = counts.most_common(1)[0]
        raise refuse(
            operator,
            "memory that is free again after backward",
            f"{format_bytes(sum(born.nbytes for born in left.values()))} that the module keeps "
            f"anew in every step",
            "do not store outputs in the module, as torch.nn.utils.weight_norm and spectral_norm "
            "do, for which "
            "torch.nn.utils.parametrizations has others, and change a parameter's .data by copy_",
        )
