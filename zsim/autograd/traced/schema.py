"""The form of a traced file: its names, numbers, rows and tables, held by pydantic.

Rows and tables make the objects of a TracedModel. Limits bound what a file from anywhere may ask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Strict, Tag, TypeAdapter

from zsim.autograd import lowered
from zsim.autograd.lowered import LoweredModule
from zsim.autograd.traced import model as traced
from zsim.io.json_reader import MAX_NAME, MAX_SENTENCE, is_name
from zsim.io.json_tables import table_of
from zsim.io.limits import MAX_INT
from zsim.ir.ops import Alloc, Free, Kernel, MemoryKind
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import Parameter, ParamGroup
from zsim.models.training_options import DTYPE_NBYTES, Batch, Device, Dtype

MAX_DIMS = 16
MAX_MODULES = 20_000
MAX_VARIANTS = 16


def _require(holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(expected)


def _name(text: str) -> str:
    _require(is_name(text), f"a name of 1 to {MAX_NAME} characters without blanks")
    return text


def _printable(text: str) -> str:
    _require(text.isprintable(), "printable characters")
    return text


Name = Annotated[str, AfterValidator(_name)]
Truth = Annotated[bool, Strict()]
Size = Annotated[int, Strict(), Field(ge=0, le=MAX_INT)]
Count = Annotated[int, Strict(), Field(ge=1, le=MAX_INT)]
Shape = Annotated[tuple[Size, ...], Field(max_length=MAX_DIMS)]


def _row(make: Callable[..., Any], *types: Any) -> Any:
    """A list with an item of each of `types`; `make` makes an object of them."""
    row: Any = tuple.__class_getitem__(types)
    return Annotated[row, AfterValidator(lambda items: make(*items))]


def _many(type_: Any, at_most: int | None = None) -> Any:
    return Annotated[tuple[type_, ...], Field(max_length=at_most)]


def _kernel(*row: Any) -> Kernel:
    kernel = Kernel(*row)
    _require(len(kernel.shape) in (0, 4) and 0 not in kernel.shape, "4 sizes above 0, or none")
    _require(bool(kernel.shape) or not kernel.transposed, "the shape of a transposed product")
    _require(
        not kernel.singly
        or kernel.singly * DTYPE_NBYTES.get(kernel.dtype, kernel.nbytes + 1) <= kernel.nbytes,
        "no more elements one by one, of a known dtype, than its bytes hold",
    )
    return kernel


def _parameter(**table: Any) -> Parameter:
    parameter = Parameter(**table)
    trained = parameter.requires_grad and parameter.in_loss
    _require(parameter.numel <= MAX_INT, "at most 2^63 - 1 elements")
    _require(parameter.numel > 0 or not trained, "sizes above 0 of what is trained")
    return parameter


KERNEL = _row(_kernel, Name, Size, Size, Name, Literal["device"], Shape, Truth, Size)
EVENTS: dict[str, tuple[type[Any], tuple[Any, ...]]] = {
    "+": (Alloc, (Name, MemoryKind, Size)),
    "-": (Free, (Name,)),
    "gradient": (lowered.ParameterGradient, (Name, Truth, Truth, Truth)),
    "accumulated": (lowered.Accumulated, (Name,)),
    "node over": (lowered.NodeOver, ()),
    "recomputed": (lowered.Recomputed, ()),
    "inner call": (lowered.InnerCall, (Name, Truth, Size)),
}
"""An event's class and the types of its fields, by the first item of its row."""
SIGNS = {kind: [sign] for sign, (kind, _) in EVENTS.items()} | {Kernel: []}


def _event(sign: str) -> Any:
    kind, types = EVENTS[sign]
    return Annotated[_row(lambda _, *row: kind(*row), Literal[sign], *types), Tag(sign)]


def _sign(row: Any) -> str | None:
    return row[0] if isinstance(row, list) and row and isinstance(row[0], str) else None


EVENT: Any = Annotated[reduce(or_, map(_event, EVENTS)), Discriminator(_sign)]
COMPUTATION = table_of(lowered.Computation, kernels=_many(KERNEL), memory=_many(EVENT))
LOWERED = table_of(
    LoweredModule,
    fqn=Name, unit=Name, forward=COMPUTATION, backward=COMPUTATION,
    input_needs_gradient=Truth, recompute=(_many(KERNEL), ()),
    caller_frees=(_many(Name), ()), returns_inner_output=(Truth, False), after_root=(Truth, False),
    freed_with_autocast_cache=(_many(_event("-")), ()),
)
MODULES = _many(LOWERED, MAX_MODULES)
CHECKPOINTING = table_of(
    Checkpointing,
    mode=Literal["full", "selective"], every=(Count, 1), save_every=(Count, 1),
    save=(tuple[Literal["linear", "attention"], ...], ()), early_stop=(Truth, True),
)
"""Activation checkpointing of whole units: a trace does not know the kinds of its operators."""
RECOMPUTING = _row(lambda *row: row, CHECKPOINTING, MODULES)
HOOK_VARIANT = table_of(
    traced.HookVariant,
    unit_hooks=Literal["none", "raw_inputs"], lowered=MODULES,
    checkpointing=(CHECKPOINTING, NO_CHECKPOINTING),
    fails=(Annotated[str, Field(max_length=MAX_SENTENCE), AfterValidator(_printable)], ""),
)
PARAMETER = table_of(
    _parameter, fqn=Name, shape=Shape, requires_grad=(Truth, True), in_loss=(Truth, True)
)
FILE = TypeAdapter[dict[str, Any]](
    table_of(
        dict,
        name=Name, dtype=Dtype, casts_input=Truth,
        batch=table_of(Batch, micro_batch=Size, sequence_length=(Size, 1)),
        autocast=(Dtype | Literal["none"], "none"), buffer_nbytes=(Size, 0),
        input_nbytes=(Size, 0),
        devices=(Annotated[tuple[Device, ...], Field(min_length=1, max_length=2)], traced.DEVICES),
        registered=(_many(Name), ()), buffers=(tuple[tuple[Name, Size], ...], ()),
        units=_many(table_of(ParamGroup, fqn=Name, parameters=_many(PARAMETER)), MAX_MODULES),
        modules=_many(
            table_of(dict, reads=tuple[tuple[Name, Name | Literal[""]], ...], lowered=LOWERED),
            MAX_MODULES,
        ),
        recomputing=(_many(RECOMPUTING, MAX_VARIANTS), ()),
        hook_variants=(_many(HOOK_VARIANT, 3 * MAX_VARIANTS + 3), ()),
    )
)
