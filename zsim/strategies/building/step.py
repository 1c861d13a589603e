"""The words that strategies are written in: a Step collects ops in issue order, a FlatStep speaks of flat param groups.

A strategy says who issues what and when; this module turns each word into ops with streams, waits and memory. It
decides no order. Gradients of a step are sums over micro-batches of means over ranks; they are kept in the dtype of
the parameters and only the reduction itself runs in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from zsim.autograd.lowered import (
    SUM_OF_GRADIENTS,
    Accumulated,
    InnerCall,
    LoweredModule,
    NodeOver,
    ParameterGradient,
    Recomputed,
    TapeEvent,
    storage_events,
)
from zsim.mesh import Mesh
from zsim.model import ModelSpec, Module, Parameter, ParamGroup
from zsim.ops import ACCUMULATE, MOVE_GRADIENT, Alloc, Free, Kernel, MemoryEvent, Op, OpKind, Stream
from zsim.program import Part, PartName, Program, RankProgram
from zsim.sharding import FlatLayout
from zsim.strategies.building.training import Training
from zsim.strategies.flat_buffer.groups import Granularity, regroup
from zsim.training import DTYPE_NBYTES

MASTER_DTYPE = "float32"
"""What the optimizer steps in: 2-byte parameters have a master copy of this dtype."""
PRODUCTS = ("linear", "conv1d")
"""Operators that multiply by a weight and may add a bias."""


@dataclass(slots=True)
class Step:
    """The ops of one phase, in issue order. `issue` appends one and returns its index, for others to wait on."""

    ops: list[Op] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def begin(self, part: PartName, *, micro_batch: int = 0) -> None:
        """What is issued from here on belongs to this part of the step."""
        self.parts.append(Part(part, len(self.ops), micro_batch))

    def issue(
        self,
        kind: OpKind,
        unit: str,
        *,
        stream: Stream = "compute",
        waits: Iterable[int] = (),
        group: str = "",
        nbytes: int = 0,
        root: int = 0,
        dtype: str = "",
        micro_batch: int = 0,
        reads: tuple[str, ...] = (),
        kernels: tuple[Kernel, ...] = (),
        memory: Iterable[MemoryEvent] = (),
    ) -> int:
        """Append an op and return its index; repeated waits count once."""
        index = len(self.ops)
        waits = tuple(waits)
        if len(waits) > 1:
            waits = tuple(sorted(set(waits)))
        # Each field by its place: by keyword an Op takes three times as long to make.
        op = Op(index, kind, unit, stream, waits, group, nbytes, root, dtype, micro_batch, reads, kernels, tuple(memory))
        self.ops.append(op)
        return index


@dataclass(slots=True)
class Again:
    """What a recomputation does up to its end, or up to a `call` of a unit in the block that it recomputes, or to its return.

    `inside`: the unit whose module runs meanwhile, "" for the block itself.
    """

    inside: str
    kernels: tuple[Kernel, ...]
    memory: list[MemoryEvent]
    call: InnerCall | None = None


BackwardEvent = MemoryEvent | Recomputed | InnerCall


def until_recomputed(tape: Iterable[BackwardEvent]) -> tuple[list[MemoryEvent], list[MemoryEvent]]:
    """A backward's memory events in two: up to the end of its recomputation, nothing when there is none, and after it."""
    events = list(tape)
    kinds = list(map(type, events))
    end = kinds.index(Recomputed) if Recomputed in kinds else 0
    return storage_events(events[:end]), storage_events(events[end:])


def recomputed_in_turn(tape: Iterable[BackwardEvent], kernels: tuple[Kernel, ...]) -> tuple[list[Again], list[MemoryEvent]]:
    """As `until_recomputed`, with what a recomputation of these `kernels` does between calls of units in the block."""
    events, again, after = list(tape), list[Again](), list[MemoryEvent]()
    kinds = set(map(type, events))
    if InnerCall not in kinds:
        before, after = until_recomputed(events) if Recomputed in kinds else ([], cast(list[MemoryEvent], events))
        return [Again("", kernels, before)] if before or kernels else [], after
    inside, start = "", 0
    for event in events:
        if type(event) is Recomputed:
            again.append(Again(inside, kernels[start:], after))
            after = []
        elif type(event) is InnerCall:
            again.append(Again(inside, kernels[start : event.kernels], after, event))
            after = []
            inside, start = "" if event.returns else event.unit, event.kernels
        else:
            after.append(event)
    return again, after


def used_parameters(module: Module) -> tuple[str, ...]:
    """The fqns that the operators of `module` read, each once."""
    return tuple(dict.fromkeys([fqn for op in module.operators for fqn in (op.weight, op.bias) if fqn]))


def units_read(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """By module: the units that own the parameters it reads."""
    owner = {parameter.fqn: unit.fqn for unit in model.units for parameter in unit.parameters}
    return {m.fqn: tuple(dict.fromkeys([owner[fqn] for fqn in used_parameters(m)])) for m in model.modules}


def units_read_by_blocks(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """By part of a block in parts: the units that own the parameters which the block reads itself, outside the units in it."""
    own = {part.whole: dict[str, None]() for part in model.modules if part.within}
    reads = units_read(model)
    for part in model.modules:
        if part.within and not part.inside:
            own[part.whole].update(dict.fromkeys(reads[part.fqn]))
    return {part.fqn: tuple(own[part.whole]) for part in model.modules if part.within}


def late_weights(training: Training) -> frozenset[str]:
    """Weights of linears with a bias: a further node transposes their gradient, so the bias's is added first, as Conv1D's is anyway.

    Not under autocast, where the nodes that cast both gradients come in the order of the casts: the bias, cast first, is last.
    """
    if training.precision.autocast != "none":
        return frozenset()
    return frozenset(op.weight for m in training.model.modules for op in m.operators if op.kind in PRODUCTS and op.bias)


def accumulated_after_sums(training: Training) -> frozenset[str]:
    """Parameters whose gradient is accumulated after the gradient of the same node's input has been added to what other nodes made.

    The engine adds when a node is over, and accumulates when it comes to the next one. Of a linear with a bias the input goes
    through a node more, so that its parameters are accumulated first.
    """
    operators = [op for module in training.model.modules for op in module.operators if not (op.kind in PRODUCTS and op.bias)]
    return frozenset(fqn for op in operators for fqn in (op.weight, op.bias) if fqn)


def adds_up(event: TapeEvent) -> bool:
    """Whether `event` makes the sum of two gradients of one value."""
    return isinstance(event, Alloc) and SUM_OF_GRADIENTS in event.buffer


def accumulated(
    tape: Iterable[TapeEvent],
    born: Callable[[ParameterGradient], tuple[list[Alloc], list[Free]]],
    *,
    after_sums: frozenset[str],
    waiting: dict[str, list[Free]],
) -> list[BackwardEvent]:
    """A module's backward, in which `born` says what a gradient allocates and what goes once it is accumulated.

    Where the tape does not say when that is, it is when the node that made it is over, and has let go of what it held; for those in
    `after_sums` later still. `waiting` is what goes with gradients that wait for the tape to say so, which may be in a later module.
    """
    found = list[BackwardEvent]()
    early, late = list[Free](), list[Free]()
    is_over = goes_on = False
    for event in tape:
        if type(event) is Free and not goes_on:
            is_over = True
            found.append(event)
            continue
        if is_over and (early or late):
            found += early
            early.clear()
            if not adds_up(event):
                found += late
                late.clear()
        is_over = False
        if type(event) is Alloc:
            found.append(event)
        elif type(event) is ParameterGradient:
            goes_on = event.goes_on
            made, gone = born(event)
            found += made
            if gone and event.waits:
                waiting.setdefault(event.fqn, []).extend(gone)
            elif gone:
                (late if event.fqn in after_sums else early).extend(gone)
        elif type(event) is Accumulated:
            found += waiting.pop(event.fqn, [])
        elif type(event) is NodeOver:
            found += early
            early.clear()
            is_over = True
        else:
            found.append(event)
    return [*found, *early, *late]


def forward_memory(training: Training, module: LoweredModule) -> list[MemoryEvent]:
    """A module's forward; after the last module's autocast empties its cache."""
    last = training.uncached if module is training.modules[-1] else ()
    return [*storage_events(module.forward.memory), *module.sums_losses, *last]


def named_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """The parameters in the order of the real module's `named_parameters()`."""
    return model.named_parameters


def trained_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """Those of `named_parameters` that get a gradient: what an optimizer steps."""
    trained = model.trained
    return tuple([parameter for parameter in named_parameters(model) if parameter.fqn in trained])


def spmd(mesh: Mesh, *, construction: Step, first: Step, steady: Step, second: Iterable[Op] = ()) -> Program:
    """A Program in which every rank runs the same ops."""
    rank = rank_program(construction.ops, first=first, steady=steady, second=second)
    return Program(mesh=mesh, ranks=(rank,), assignment=(0,) * mesh.world_size)


def rank_program(construction: Iterable[Op], *, first: Step, steady: Step, second: Iterable[Op] = ()) -> RankProgram:
    """What one rank runs: the ops of both steps and their parts, and between them those of `second`."""
    return RankProgram(
        construction=tuple(construction),
        first=tuple(first.ops),
        steady=tuple(steady.ops),
        second=tuple(second),
        first_parts=tuple(first.parts),
        steady_parts=tuple(steady.parts),
    )


def copy_kernel(numel: int, *, source: str, target: str) -> Kernel:
    """A copy of `numel` elements that may change their dtype."""
    return Kernel("copy", 0, numel * (DTYPE_NBYTES[source] + DTYPE_NBYTES[target]), target)


def move_gradients(numel: int, *, source: str, target: str, reduced_in: str) -> Kernel:
    """A copy of gradients into what is reduced, or back; a cast to something narrower than float32 is a plain copy, always made."""
    copy = copy_kernel(numel, source=source, target=target)
    return replace(copy, operator=MOVE_GRADIENT) if source == target or reduced_in == MASTER_DTYPE else copy


def add_kernel(numel: int, *, of: str, to: str) -> Kernel:
    """Elements of dtype `of` added in place to as many of dtype `to`: both read, the sum written."""
    return Kernel("add", numel, numel * (DTYPE_NBYTES[of] + 2 * DTYPE_NBYTES[to]), to)


def fill_kernel(numel: int, *, dtype: str) -> Kernel:
    """Zeros written over `numel` elements."""
    return Kernel("fill", 0, numel * DTYPE_NBYTES[dtype], dtype)


def accumulate_kernel(numel: int, *, dtype: str) -> Kernel:
    """A gradient of one parameter added to what earlier micro-batches have left of it."""
    return replace(add_kernel(numel, of=dtype, to=dtype), operator=ACCUMULATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """A param group as one flat buffer, cut into shards; one that is not `trained` has no gradients and is not stepped."""

    group: ParamGroup
    layout: FlatLayout
    trained: bool = True

    @property
    def fqn(self) -> str:
        """The name of the param group."""
        return self.group.fqn


def flat_groups(
    model: ModelSpec, *, granularity: Granularity, num_shards: int, dtype: str
) -> tuple[FlatGroup, ...]:
    """The flat buffers of a model; `granularity` is "unit", "parameter" or a bucket size in bytes of `dtype`.

    Parameters that get no gradient lie in buffers of their own, those of a whole unit in "<unit>.frozen".
    """
    trained, element = model.trained, DTYPE_NBYTES[dtype]
    kept = _parts(model.units, lambda parameter: parameter.fqn in trained)
    rest = _parts(model.units, lambda parameter: parameter.fqn not in trained, suffix=".frozen")
    return tuple(
        FlatGroup(
            group=group,
            layout=FlatLayout(numels=tuple(p.numel for p in group.parameters), num_shards=num_shards),
            trained=steps,
        )
        for units, steps in ((kept, True), (rest, False))
        for group in regroup(units, granularity=granularity, element_nbytes=element)
    )


def _parts(units: Sequence[ParamGroup], wanted: Callable[[Parameter], bool], *, suffix: str = "") -> list[ParamGroup]:
    """The wanted parameters of each unit that has some; without a suffix a unit of no parameters at all stays."""
    parts = [replace(u, fqn=u.fqn + suffix, parameters=tuple(filter(wanted, u.parameters))) for u in units]
    return [part for part, unit in zip(parts, units, strict=True) if part.parameters or not (suffix or unit.parameters)]
