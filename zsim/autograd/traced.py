"""TracedModel: a model that was seen running, as data: its units, and what each stretch computes,
allocates and frees.

A tracer makes it once; strategies then plan with it as with any other model;
zsim.autograd.traced_file is its form as JSON. It knows no torch and no operator's meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from zsim.autograd.lowered import NOTHING, LoweredModule, UnitHooks
from zsim.autograd.traced_checks import problems
from zsim.errors import ZsimError
from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free
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

DEVICES: Final[tuple[Device, ...]] = ("cpu", "cuda")
DEVICE_NAMES: Final[dict[Device, str]] = {"cpu": "a CPU", "cuda": "CUDA"}

FALLBACKS: Final[dict[UnitHooks, tuple[UnitHooks, ...]]] = {
    "fully_shard": (),
    "none": ("none",),
    "fsdp1_views": ("fsdp1_views", "none"),
    "raw_inputs": ("raw_inputs", "none"),
}
"""By hooks of the strategy: the variants of a trace to look for, the best first; without any of
them the trace with fully_shard's hooks is the same."""


class TracedModelError(ZsimError):
    """A traced model that does not hold together, or a file that holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookVariant:
    """The lowered modules under other `unit_hooks` than fully_shard's, with `checkpointing`.

    `lowered` is () where the module fails under them; `fails` is then the error.
    """

    unit_hooks: UnitHooks
    checkpointing: Checkpointing
    lowered: tuple[LoweredModule, ...]
    fails: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel(ModelSpec):
    """A ModelSpec with its lowered modules, valid for the batch, dtype and device of its trace.

    `casts_input`: floating-point inputs of the model and its units are cast to `dtype`, as
    fully_shard does. `autocast`: the dtype of torch.autocast around its forward. `buffer_nbytes`:
    bytes of the module's buffers and of what its first forward leaves in it. `input_nbytes`: bytes
    that the caller holds. No strategy counts either. `devices`: those with the kernels of the
    trace; both if no kernel depends on the device. `lowered`: under fully_shard's hooks.
    `recomputing`: the same for each activation checkpointing around its units. `hook_variants`: the
    lowered modules under the hooks of other strategies, where they differ.
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

        Without a `device` it is not asked for which the trace stands.
        """
        if device is not None and device not in self.devices:
            raise TracedModelError(
                where=self.name,
                expected=f"a trace with the kernels that torch takes on {DEVICE_NAMES[device]}",
                found=f"one with those of {DEVICE_NAMES[self.devices[0]]}, of which some keep "
                      f"other bytes (attention, dropout, norms)",
                remedy=f'trace it again with device="{device}"',
            )
        if casts_input and not self.casts_input and self.dtype != "float32":
            raise TracedModelError(
                where=self.name,
                expected="inputs that are cast to the parameters' dtype, for this strategy",
                found="a trace that casts none",
                remedy="trace it again with casts_input=True",
            )
        variants = {NO_CHECKPOINTING: self.lowered, **dict(self.recomputing)}
        if checkpointing not in variants:
            raise TracedModelError(
                where=self.name,
                expected="activation checkpointing that it was traced with",
                found=f"{checkpointing}, where it has {' and '.join(map(str, variants))}",
                remedy="trace it again with checkpointing=[Checkpointing(…)], or wrap its blocks "
                       "in torch.utils.checkpoint before",
            )
        asked = {
            "dtype": dtype,
            "autocast": autocast,
            "micro_batch": batch.micro_batch,
            "sequence_length": batch.sequence_length,
        }
        known = {
            "dtype": self.dtype,
            "autocast": self.autocast,
            "micro_batch": self.batch.micro_batch,
            "sequence_length": self.batch.sequence_length,
        }
        for name, value in asked.items():
            if value != known[name]:
                raise TracedModelError(
                    where=self.name,
                    expected=f"{name} {known[name]}, at which it was traced",
                    found=f"{value}",
                    remedy="trace the module again with such inputs",
                )
        return self._with(unit_hooks, checkpointing, hooked=variants[checkpointing])

    def _with(
        self,
        unit_hooks: UnitHooks,
        checkpointing: Checkpointing,
        *,
        hooked: tuple[LoweredModule, ...],
    ) -> tuple[LoweredModule, ...]:
        """The lowered modules where autograd has that of units; TracedModelError where the module
        does not run so."""
        found = {
            one.unit_hooks: one for one in self.hook_variants if one.checkpointing == checkpointing
        }
        form = next((found[one] for one in FALLBACKS[unit_hooks] if one in found), None)
        if form is not None and not form.lowered and form.unit_hooks == "fsdp1_views":
            raise TracedModelError(
                where=self.name,
                expected="a module that changes none of its parameters in forward: FSDP1 makes "
                         "them views of a flat one, which "
                "autograd lets nobody change in place",
                found=form.fails,
                remedy="change its .data, which autograd does not see, or use fsdp2, hsdp or ddp",
            )
        if form is not None and not form.lowered:
            given = (
                f"; trace it with casts_input=False if the model's inputs come in {self.dtype}"
                if form.unit_hooks == "raw_inputs"
                else ""
            )
            raise TracedModelError(
                where=self.name,
                expected="a module that runs without the hooks of fully_shard, which this "
                         "strategy does not have",
                found=form.fails or "one that does not",
                remedy=f"hooks cast what the model and its units take to {self.dtype}, and give "
                       f"zeros as gradients of what those leave: "
                f"make these in the module itself, or use fsdp2 or hsdp{given}",
            )
        return hooked if form is None else form.lowered


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


def whole(
    lowered: Iterable[LoweredModule], uncached: tuple[Free, ...]
) -> tuple[LoweredModule, ...]:
    """`lowered` with what follows from all of them: which have a backward, and what goes when
    forward is over.

    Before the first that does something in backward none has. Later a unit has none in a run of
    which no stretch does anything there or takes what needs a gradient, as one that is called under
    no_grad.
    """
    found = tuple(lowered)
    first = next((place for place, one in enumerate(found) if one.backward != NOTHING), 0)
    runs = {
        _run(one)
        for one in found
        if one.unit == ROOT or one.backward != NOTHING or one.input_needs_gradient
    }
    found = tuple(
        replace(one, differentiates=place >= first and _run(one) in runs)
        for place, one in enumerate(found)
    )
    return (*found[:-1], *(replace(one, freed_with_autocast_cache=uncached) for one in found[-1:]))


def _run(one: LoweredModule) -> tuple[str, str]:
    """The unit, and which of its runs in a forward."""
    return one.unit, run_of(one.fqn)


def placed(modules: Iterable[Module], *, units: Iterable[ParamGroup]) -> tuple[Module, ...]:
    """`modules` that know which unit they lie in: those of units in a unit, and the parts that
    those cut that one into."""
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
    """As `check`; and where inputs of the model are cast, there must be a form for strategies that
    cast none."""
    known = {one.checkpointing for one in model.hook_variants if one.unit_hooks == "raw_inputs"}
    for asked, lowered in ((NO_CHECKPOINTING, model.lowered), *model.recomputing):
        if asked not in known and any(map(_casts_input, lowered)):
            expected = (
                "one form in which the model's inputs are as they were given, beside that in "
                "which they are cast"
            )
            raise TracedModelError(
                where=model.name, expected=expected, found="none", remedy="trace the module again"
            )
    return check(model)


def check(model: TracedModel) -> TracedModel:
    """`model` itself; TracedModelError naming the first thing in it that does not hold together."""
    last = model.modules[-1].fqn if model.modules else ""
    for lowered in (model.lowered, *(again for _, again in model.recomputing)):
        for where, expected, found in problems(model, lowered, loss=Buffer.of(last, LOSS)):
            raise TracedModelError(
                where=where, expected=expected, found=found, remedy="trace the module again"
            )
    known = {(one.unit_hooks, one.checkpointing) for one in model.hook_variants}
    if len(known) < len(model.hook_variants) or {asked for _, asked in known} - {
        NO_CHECKPOINTING, *(asked for asked, _ in model.recomputing)
    }:
        expected = (
            "one form for each way of autograd and each activation checkpointing that was traced"
        )
        raise TracedModelError(
            where=model.name, expected=expected, found="others", remedy="trace the module again"
        )
    for one in model.hook_variants:
        views = one.unit_hooks == "fsdp1_views"
        for where, expected, found in (
            problems(model, one.lowered, loss=Buffer.of(last, LOSS), views=views)
            if one.lowered
            else ()
        ):
            raise TracedModelError(
                where=where, expected=expected, found=found, remedy="trace the module again"
            )
    return model
