"""TracedModel: a model that was seen running, as data: its units, and what each stretch computes,
allocates and frees.

A tracer makes it once; strategies then plan with it as with any other model;
zsim.autograd.traced_file is its form as JSON. It knows no torch and no operator's meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from zsim.autograd.lowered import NOTHING, Autograd, LoweredModule
from zsim.autograd.traced_checks import problems
from zsim.errors import ZsimError
from zsim.ir.ops import Alloc, Free
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.operators import Operator, OperatorKind
from zsim.models.spec import MODEL_INPUT, ROOT, RUN, ModelSpec, Module, ParamGroup, is_model_input
from zsim.models.training_options import Batch, Device, Dtype

FAMILY: Final = "traced"
LOSS = "loss"

DEVICES: Final[tuple[Device, ...]] = ("cpu", "cuda")
DEVICE_NAMES: Final[dict[Device, str]] = {"cpu": "a CPU", "cuda": "CUDA"}

FORMS: Final[dict[Autograd, tuple[Autograd, ...]]] = {
    "hooked": (),
    "plain": ("plain",),
    "views": ("views", "plain"),
    "bare": ("bare", "plain"),
}
"""By what autograd has of units: the forms in which a trace may hold it, the best first, where it
is not as with hooks."""


class TracedModelError(ZsimError):
    """A traced model that does not hold together, or a file that holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Otherwise:
    """The lowered modules with `checkpointing`, where autograd has something else of units than
    fully_shard's hooks.

    () where the module does not run so; `fails` then says how.
    """

    autograd: Autograd
    checkpointing: Checkpointing
    lowered: tuple[LoweredModule, ...]
    fails: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel(ModelSpec):
    """A ModelSpec that brings its lowered modules along. It stands for the batch, dtype and device
    it was traced at.

    `casts_input`: floating-point inputs, of the model and of its units, were cast to `dtype` as
    fully_shard does. `autocast`: the dtype of torch.autocast around its forward. `buffer_nbytes`
    are held by the module itself (its buffers, and what its first forward left in it),
    `input_nbytes` by the caller; no strategy counts either. `devices`: those whose kernels it
    shows, both where none of them depends on that. `recomputing`: the lowered modules once more for
    each activation checkpointing that was put around its units from outside. All these are as
    fully_shard's hooks make them; `otherwise`, where that differs, once more as other strategies
    have them.
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
    otherwise: tuple[Otherwise, ...] = ()

    def modules_for(
        self,
        batch: Batch,
        *,
        dtype: str,
        casts_input: bool,
        checkpointing: Checkpointing = NO_CHECKPOINTING,
        autocast: str = "none",
        device: Device | None = None,
        autograd: Autograd = "hooked",
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
        return self._with(autograd, checkpointing, hooked=variants[checkpointing])

    def _with(
        self, autograd: Autograd, checkpointing: Checkpointing, *, hooked: tuple[LoweredModule, ...]
    ) -> tuple[LoweredModule, ...]:
        """The lowered modules where autograd has that of units; TracedModelError where the module
        does not run so."""
        found = {one.autograd: one for one in self.otherwise if one.checkpointing == checkpointing}
        form = next((found[one] for one in FORMS[autograd] if one in found), None)
        if form is not None and not form.lowered and form.autograd == "views":
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
                if form.autograd == "bare"
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
    return (*found[:-1], *(replace(one, uncached=uncached) for one in found[-1:]))


def _run(one: LoweredModule) -> tuple[str, str]:
    """The unit, and which of its runs in a forward."""
    return one.unit, one.fqn.partition(RUN)[2]


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
    known = {one.checkpointing for one in model.otherwise if one.autograd == "bare"}
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
        for where, expected, found in problems(model, lowered, loss=f"{last}:{LOSS}"):
            raise TracedModelError(
                where=where, expected=expected, found=found, remedy="trace the module again"
            )
    known = {(one.autograd, one.checkpointing) for one in model.otherwise}
    if len(known) < len(model.otherwise) or {asked for _, asked in known} - {
        NO_CHECKPOINTING, *(asked for asked, _ in model.recomputing)
    }:
        expected = (
            "one form for each way of autograd and each activation checkpointing that was traced"
        )
        raise TracedModelError(
            where=model.name, expected=expected, found="others", remedy="trace the module again"
        )
    for one in model.otherwise:
        views = one.autograd == "views"
        for where, expected, found in (
            problems(model, one.lowered, loss=f"{last}:{LOSS}", views=views) if one.lowered else ()
        ):
            raise TracedModelError(
                where=where, expected=expected, found=found, remedy="trace the module again"
            )
    return model
