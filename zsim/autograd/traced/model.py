"""TracedModel: a model that was seen running, as data: its units, and what each stretch computes,
allocates and frees.

A tracer makes it once; strategies then plan with it as with any other model;
zsim.autograd.traced.traced_file is its form as JSON. It knows no torch and no operator's meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from zsim.autograd.lowered import NOTHING, LoweredModule, UnitHooks
from zsim.errors import ZsimError
from zsim.ir.buffers import buffer_of
from zsim.ir.ops import Alloc
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.operators import Operator, OperatorKind
from zsim.models.spec import (
    MODEL_INPUT,
    ROOT,
    ModelSpec,
    Module,
    ParamGroup,
    is_model_input,
    run_of,
)
from zsim.models.training_options import Batch, Device, Dtype

FAMILY: Final = "traced"
LOSS = "loss"
LOSS_MODULE: Final = f"{ROOT}.loss"
"""The module of what the caller of the whole one computes of its output."""

DEVICES: Final[tuple[Device, ...]] = ("cpu", "cuda")
DEVICE_NAMES: Final[dict[Device, str]] = {"cpu": "a CPU", "cuda": "CUDA"}

FALLBACKS: Final[dict[UnitHooks, tuple[UnitHooks, ...]]] = {
    "fully_shard": (),
    "none": ("none",),
    "fsdp1_views": ("none",),
    "raw_inputs": ("raw_inputs", "none"),
}
"""Variants of a trace to look for under the hooks of a strategy, the best first. Without any the
trace under fully_shard's hooks is the same."""


AGAIN = {
    "micro_batch": "trace it again with --input BxS and the values that --micro-batch names",
    "sequence_length": "trace it again with --input BxS and the values that --sequence-length "
                       "names",
    "dtype": "trace it again with that --dtype",
    "autocast": "name it in precision.autocast, or trace it again with another --autocast",
}
"""Way to mend a scenario that asks for what a trace does not have, by key."""


class TracedModelError(ZsimError):
    """A traced model that does not hold together, or a file that holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookVariant:
    """The lowered modules under other `unit_hooks` than fully_shard's, with `checkpointing`.

    `lowered` is () where the module fails under them; `fails` is then the error.
    """

    unit_hooks: UnitHooks
    checkpointing: Checkpointing = NO_CHECKPOINTING
    lowered: tuple[LoweredModule, ...]
    fails: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel(ModelSpec):
    """A ModelSpec with its lowered modules, valid for the batch, dtype and device of its trace.

    - `casts_input`: fully_shard casts floating-point inputs of the model and its units to `dtype`.
    - `autocast`: the dtype of torch.autocast around forward.
    - `buffer_nbytes`: bytes of the module's buffers, and of tensors that its first forward leaves.
    - `input_nbytes`: bytes that the caller holds. No strategy counts these or the buffers.
    - `devices`: those with the kernels of the trace; both if no kernel depends on the device.
    - `lowered`: the modules under fully_shard's hooks.
    - `recomputing`: the same for each activation checkpointing around its units.
    - `hook_variants`: the modules under the hooks of other strategies, where they differ.
    """

    lowered: tuple[LoweredModule, ...]
    dtype: Dtype
    batch: Batch
    casts_input: bool
    autocast: Dtype | Literal["none"] = "none"
    buffer_nbytes: int = 0
    input_nbytes: int = 0
    devices: tuple[Device, ...] = DEVICES
    recomputing: tuple[tuple[Checkpointing, tuple[LoweredModule, ...]], ...] = ()
    hook_variants: tuple[HookVariant, ...] = ()

    def modules_for(
        self,
        batch: Batch,
        *,
        dtype: str,
        casts_input: bool,
        checkpointing: Checkpointing = NO_CHECKPOINTING,
        autocast: str = "none",
        device: Device | None = None,
        unit_hooks: UnitHooks = "fully_shard",
    ) -> tuple[LoweredModule, ...]:
        """The lowered modules; TracedModelError for another batch, dtype, autocast or device, or
        for checkpointing that was not traced.

        Without a `device` any trace will do.
        """
        self._require_device(device)
        if casts_input and not self.casts_input and self.dtype != "float32":
            raise TracedModelError(
                where=self.name,
                expected="inputs that are cast to the parameters' dtype, for this strategy",
                found="a trace that casts none",
                remedy="trace it again with casts_input=True",
            )
        traces = {NO_CHECKPOINTING: self.lowered, **dict(self.recomputing)}
        if checkpointing not in traces:
            raise TracedModelError(
                where=self.name,
                expected="activation checkpointing that it was traced with",
                found=f"{checkpointing.words}, where it has "
                      f"{' and '.join(each.words for each in traces)}",
                remedy="trace it again with --checkpointing, or wrap its blocks in "
                       "torch.utils.checkpoint before",
            )
        for key, value, traced in (
            ("dtype", dtype, self.dtype),
            ("autocast", autocast, self.autocast),
            ("micro_batch", batch.micro_batch, self.batch.micro_batch),
            ("sequence_length", batch.sequence_length, self.batch.sequence_length),
        ):
            if value != traced:
                raise TracedModelError(
                    where=self.name, expected=f"{key} {traced}, at which it was traced",
                    found=str(value), remedy=AGAIN.get(key, "trace the module again so"),
                )
        variant = self._variant(unit_hooks, checkpointing)
        if variant is None:
            return traces[checkpointing]
        if not variant.lowered:
            raise self._fails(variant)
        return variant.lowered

    def _require_device(self, device: Device | None) -> None:
        if device is not None and device not in self.devices:
            raise TracedModelError(
                where=self.name,
                expected=f"a trace with the kernels that torch takes on {DEVICE_NAMES[device]}",
                found=f"one with those of {DEVICE_NAMES[self.devices[0]]}, of which some keep "
                      f"other bytes (attention, dropout, norms)",
                remedy=f"trace it again with --device {device}",
            )

    def _variant(self, unit_hooks: UnitHooks, checkpointing: Checkpointing) -> HookVariant | None:
        """The best variant under these hooks; None where fully_shard's hooks change nothing."""
        known = {v.unit_hooks: v for v in self.hook_variants if v.checkpointing == checkpointing}
        return next((known[hooks] for hooks in FALLBACKS[unit_hooks] if hooks in known), None)

    def _fails(self, variant: HookVariant) -> TracedModelError:
        """The error for a strategy under whose hooks the module does not run."""
        uncast = (
            f"; trace it with casts_input=False if the model's inputs come in {self.dtype}"
            if variant.unit_hooks == "raw_inputs"
            else ""
        )
        return TracedModelError(
            where=self.name,
            expected="a module that runs without the hooks of fully_shard, which this strategy "
                     "does not have",
            found=variant.fails or "one that does not",
            remedy=f"cast inputs to {self.dtype} and give zeros as missing gradients in the module "
                   f"itself, as these hooks do, or use fsdp2 or hsdp{uncast}",
        )


def stretch(fqn: str, *, unit: str, weights: tuple[tuple[str, str], ...], last: bool) -> Module:
    """A Module of a traced model: the parameters it reads, as (weight, bias) or (parameter, "").

    A weight comes with a bias where autograd accumulates the bias's gradient first, as for a linear
    layer. The last one ends in the value `LOSS`.
    """
    operators = [
        _operator(
            "linear" if bias else FAMILY, name=weight, weight=weight, bias=bias, output=weight
        )
        for weight, bias in weights
    ]
    if last or not operators:
        operators.append(
            _operator(FAMILY, name=fqn, weight="", bias="", output=LOSS if last else "y")
        )
    return Module(fqn=fqn, unit=unit, operators=tuple(operators))


def whole(lowered: Iterable[LoweredModule]) -> tuple[LoweredModule, ...]:
    """`lowered`, each marked as `differentiates` or not, which follows from all of them.

    No module differentiates before the first with an event in backward. Later runs of a unit do,
    if a stretch of the run has an event in backward or an input that needs a gradient. A unit
    called under no_grad has neither.
    """
    modules = tuple(lowered)
    first = next((i for i, module in enumerate(modules) if module.backward != NOTHING), 0)
    runs = {
        _run(module)
        for module in modules
        if module.unit == ROOT or module.backward != NOTHING or module.input_needs_gradient
    }
    return tuple(
        replace(module, differentiates=i >= first and _run(module) in runs)
        for i, module in enumerate(modules)
    )


def _run(module: LoweredModule) -> tuple[str, str]:
    """The unit, and the number of its run in a forward."""
    return module.unit, run_of(module.fqn)


def placed(modules: Iterable[Module], *, units: Iterable[ParamGroup]) -> tuple[Module, ...]:
    """`modules` with the unit around each: for units in a unit, and for the parts between them."""
    fqns = [unit.fqn for unit in units if unit.fqn != ROOT]
    around = {
        fqn: max((other for other in fqns if fqn.startswith(f"{other}.")), key=len, default="")
        for fqn in fqns
    }
    cut = set(around.values())
    within = {fqn: fqn if fqn in cut else outer for fqn, outer in around.items()}
    return tuple(replace(module, within=within.get(module.unit, "")) for module in modules)


def _operator(kind: OperatorKind, *, name: str, weight: str, bias: str, output: str) -> Operator:
    return Operator(
        kind=kind, name=name, inputs=(MODEL_INPUT,), output=output, weight=weight, bias=bias
    )


def _casts_input(module: LoweredModule) -> bool:
    return any(
        isinstance(event, Alloc) and is_model_input(event.buffer) for event in module.forward.memory
    )


def check_whole(model: TracedModel) -> TracedModel:
    """Check as `check` does, and require a variant with raw inputs where the model's inputs are
    cast."""
    known = {v.checkpointing for v in model.hook_variants if v.unit_hooks == "raw_inputs"}
    for policy, lowered in ((NO_CHECKPOINTING, model.lowered), *model.recomputing):
        if policy not in known and any(map(_casts_input, lowered)):
            raise _broken(
                model.name,
                "a form with the model's own inputs beside the form with cast inputs",
                "none",
            )
    return check(model)


def check(model: TracedModel) -> TracedModel:
    """`model` itself; TracedModelError for the first law of `traced_checks` that it breaks."""
    known = {(v.unit_hooks, v.checkpointing) for v in model.hook_variants}
    traced = {NO_CHECKPOINTING, *(policy for policy, _ in model.recomputing)}
    _require_laws(model, [model.lowered, *(lowered for _, lowered in model.recomputing)])
    if len(known) < len(model.hook_variants) or {policy for _, policy in known} - traced:
        raise _broken(
            model.name,
            "one form for each way of autograd and each activation checkpointing that was traced",
            "others",
        )
    _require_laws(model, [v.lowered for v in model.hook_variants if v.lowered])
    return model


def _require_laws(model: TracedModel, traces: Iterable[tuple[LoweredModule, ...]]) -> None:
    from zsim.autograd.traced.checks import problems  # start-up: few models are traced

    loss = buffer_of(model.modules[-1].fqn if model.modules else "", LOSS)
    for lowered in traces:
        for where, expected, instead in problems(model, lowered, loss=loss):
            raise _broken(where, expected, instead)


def _broken(where: str, expected: str, instead: str) -> TracedModelError:
    return TracedModelError(
        where=where, expected=expected, found=instead, remedy="trace the module again"
    )
