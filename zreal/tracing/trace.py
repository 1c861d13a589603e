"""nn.Module to TracedModel: one step on fake tensors, watched, for each way in which strategies
differ. No weights, no GPU, no memory.

The trace records what torch on a CPU does with such inputs: the life of each storage, the operators
that run, and their unit. Anything that does not follow from shapes alone is refused by name. Two
runs of frees are in another order than torch's, which moves no peak:

- Leaves in the graph and tensors on the ctx of a Function go after the loss's gradient and before
  the loss.
- A function of torch.nn.functional frees its temporaries before its arguments, as the modes that
  watch it hold these longer.

This module must not know strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Literal

from torch import Tensor, nn

from zreal import torch_private
from zreal.modules.checkpointing import recomputing
from zreal.modules.initial_values import DTYPES
from zreal.tracing.errors import UntraceableError, refuse
from zreal.tracing.fake_module import Inputs, default_batch, fake, made, require_word
from zreal.tracing.fakes.autocast_names import AutocastNames
from zreal.tracing.fakes.cuda_autocast import CudaAutocast
from zreal.tracing.fakes.device_kernels import KernelChoices
from zreal.tracing.module_values import tensors_in
from zreal.tracing.storage_log import StorageLog
from zreal.tracing.to_model import TracedStep, traced_model, traced_otherwise
from zreal.tracing.units.param_groups import UnitChoice, total
from zreal.tracing.watched_step import StepWatcher, WatchedStep
from zsim.autograd.lowered import LoweredModule, UnitHooks
from zsim.autograd.traced.model import (
    DEVICES,
    HookVariant,
    TracedModel,
    TracedModelError,
    check_whole,
)
from zsim.io.json_reader import MAX_SENTENCE, is_name
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.checkpointing import problems as checkpointing_problems
from zsim.models.training_options import Batch, Device, Dtype, Precision


def trace(
    module: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    *,
    units: UnitChoice = None,
    dtype: Dtype | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    casts_input: bool = True,
    autocast: Dtype | Literal["none"] = "none",
    batch: Batch | None = None,
    sums_in_place: bool = True,
    device: Device = "cpu",
    checkpointing: Sequence[Checkpointing] = (),
    name: str = "",
) -> TracedModel:
    """One step of `module` on `inputs` as a model: what each unit computes, allocates and frees.

    The module is left as it was.

    - `module` may be on any device, "meta" for a large one, or be a function that makes it without
      memory. Parameters that do not require gradients are frozen.
    - `inputs`: positional (a sequence) or by name (a mapping). Each is a tensor, a (shape, dtype)
      pair, or any other value as it is. Values matter only of small integer tensors, where the
      module asks for them.
    - `units`: fqns, or a predicate of fqn and module. The default is the children of the longest
      ModuleList, those with parameters. All else belongs to the root; a nested unit owns its own
      parameters. ddp and zero_redundancy have no units: with `units=[]` they take what the rules of
      units refuse.
    - `dtype` of the parameters, by default their own. Parameters in float32 may be traced in
      another. Mixed dtypes, float64, integers and complex numbers are refused.
    - `loss` makes the scalar of the output. The default is `output.loss`, else a scalar `output`
      itself, else `output.float().sum()`. It counts as forward, after that of the root, and the
      output goes with it.
    - `casts_input`: floating-point inputs of the model and its units are cast to `dtype`, as
      fully_shard does; other strategies take the model's as they are given. Otherwise the model's
      inputs are in `dtype`.
    - `autocast`: the dtype of torch.autocast around forward and loss.
    - `batch`: the default is dim 0 of the first input, and dim 1 if it is integer.
    - `sums_in_place=False`: gradients of one value are never added in place, as in torch while a
      dispatch mode such as `zreal.meters.memory` watches it.
    - `device`: that of the kernels. If no kernel depends on it, the trace stands for both devices.
    - `checkpointing`: also trace the units recomputed, as checkpoint_wrapper around each does. A
      scenario may then ask for any of them.

    The trace also has the step under the hooks of other strategies, where torch allocates other
    bytes. UntraceableError names anything that shapes alone do not determine.
    """
    if dtype is not None:
        require_word("dtype", dtype, tuple(DTYPES))
    if name and not is_name(name):
        raise refuse(
            "name", "one without blanks, commas and bars", repr(name[:80]),
            "scenarios and messages call the model so",
        )
    require_word("device", device, DEVICES)
    request = _Request(
        module=module, inputs=inputs, units=units, dtype=dtype, autocast=autocast, loss=loss,
        casts_input=casts_input, batch=batch, sums_in_place=sums_in_place, device=device, name=name,
    )
    with _ONE_AT_A_TIME:
        return _traced(request, checkpointing)


_ONE_AT_A_TIME = RLock()
"""Threads wait for each other, as functions and kernels of torch are replaced for all of them."""


def _traced(request: _Request, checkpointing: Sequence[Checkpointing]) -> TracedModel:
    """The model of a request, also recomputed."""
    try:
        plain, variants_of_hooks = _both(request)
        variants = []
        for each in checkpointing:
            again, others = _both(request, each, _require_known(each, plain))
            variants.append((each, _alike(plain, again, each).lowered))
            variants_of_hooks += others
        return check_whole(
            replace(plain, recomputing=tuple(variants), hook_variants=tuple(variants_of_hooks))
        )
    except TracedModelError as error:  # to trace it again would find the same
        raise refuse(error.where, error.expected, error.found, UNMODELLED) from error


UNMODELLED = (
    "leave the unit out of units, take more samples, or write that part in another way: zsim does "
    "not model its autograd"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of `trace` that each of its steps has."""

    module: nn.Module | Callable[[], nn.Module]
    inputs: Inputs
    units: UnitChoice
    dtype: Dtype | None
    autocast: Dtype | Literal["none"]
    loss: Callable[[Any], Tensor] | None
    casts_input: bool
    batch: Batch | None
    sums_in_place: bool
    device: Device
    name: str

    def step(
        self, policy: Checkpointing, recomputed: Iterable[str], unit_hooks: UnitHooks
    ) -> tuple[TracedStep, WatchedStep]:
        """One step under these hooks, in which the modules called `recomputed` are so by `policy`.
        """
        device, module = self.device, self.module
        with torch_private.fake_mode(), torch_private.failures_unlogged():
            log, choices = StorageLog(device), KernelChoices(device)
            names = AutocastNames(device, in_order=log.in_order)
            with log, names:
                model = module if isinstance(module, nn.Module) else made(module)
            log.restart()
            step = fake(
                model, self.inputs, units=self.units, dtype=self.dtype,
                casts_input=self.casts_input,
            )
            with choices, names, self._casts(), recomputing(model, recomputed, policy):
                run, held = StepWatcher(
                    step=step, log=log, loss=self.loss,
                    casts=Precision(parameters=step.dtype, autocast=self.autocast),
                    sums_in_place=self.sums_in_place, unit_hooks=unit_hooks,
                ).steady()
        matters = choices.seen or log.device_matters or names.seen
        traced = TracedStep(
            name=self.name or type(model).__name__, groups=step.groups, dtype=step.dtype,
            batch=self.batch or default_batch(step), casts_input=step.cast is not None,
            autocast=self.autocast, buffer_nbytes=total(step.buffers.values()) + held,
            input_nbytes=total(tensors_in((step.args, step.kwargs))),
            devices=(device,) if matters else DEVICES, registered=tuple(step.parameters),
            buffers=tuple(
                (str(b.dtype).removeprefix("torch."), total([b])) for b in step.buffers.values()
            ),
        )
        return traced, run

    def _casts(self) -> AbstractContextManager[object]:
        """Autocast of a CPU as that of the device casts."""
        return nullcontext() if self.device == "cpu" else CudaAutocast()


def _both(
    request: _Request, policy: Checkpointing = NO_CHECKPOINTING, recomputed: Iterable[str] = ()
) -> tuple[TracedModel, list[HookVariant]]:
    """The model with fully_shard's hooks, and what is otherwise without them and on inputs that
    nobody casts."""
    step, run = request.step(policy, recomputed, "fully_shard")
    model = traced_model(step, run)
    variants, last = list[HookVariant](), model.lowered
    manners: list[UnitHooks] = ["none"] if run.boundaries.differs else []
    if run.cast_inputs:
        manners.append("raw_inputs")
    for unit_hooks in manners:
        lowered, fails = tuple[LoweredModule, ...](), ""
        try:
            lowered = traced_otherwise(*request.step(policy, recomputed, unit_hooks), like=model)
        except UntraceableError as error:
            fails = _sentence(str(error))
        if lowered != last or (unit_hooks == "raw_inputs" and not lowered):
            variants.append(
                HookVariant(
                    unit_hooks=unit_hooks, checkpointing=policy, lowered=lowered, fails=fails
                )
            )
        last = lowered
    return model, variants


def _sentence(text: str) -> str:
    """`text` in one line, at most as long as a file may have it."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_SENTENCE]


def _require_known(policy: Checkpointing, model: TracedModel) -> frozenset[str]:
    """The units that `policy` is of; UntraceableError for what a trace cannot know."""
    expected = 'mode "full", or "selective" with `save`, of its units'
    if policy.mode == "none" or policy.recompute:
        raise refuse("checkpointing", expected, str(policy), "wrap the parts in "
                                                            "torch.utils.checkpoint inside the "
                                                            "module")
    problem = next(checkpointing_problems(policy, model), "")
    if problem or not model.blocks:
        raise refuse(
            "checkpointing", expected, problem or "a module without units",
            "name its blocks by units=",
        )
    return policy.applies_to(model)


def _alike(plain: TracedModel, again: TracedModel, policy: Checkpointing) -> TracedModel:
    """`again`, which recomputes; UntraceableError where it is not cut into the same parts."""
    if again.modules != plain.modules or again.devices != plain.devices:
        raise refuse(
            str(policy), "the same parts with activation checkpointing as without", "others",
            "give each block a unit of its own",
        )
    return again
