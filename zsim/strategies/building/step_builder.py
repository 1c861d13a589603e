"""StepBuilder: collects ops in issue order, with streams, waits and memory; it decides no order.

Gradients of a step are sums over micro-batches of means over ranks. They have the dtype of the
parameters; only the reduction itself runs in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from zsim.autograd.host_copies import KEPT
from zsim.autograd.lowered import HostCopies
from zsim.ir.buffers import Buffer, buffer_of, role_of
from zsim.ir.mesh import Mesh
from zsim.ir.ops import (
    PAGEABLE,
    Alloc,
    Free,
    HostEvent,
    Kernel,
    MemoryEvent,
    MemoryKind,
    Op,
    OpKind,
    Stream,
)
from zsim.ir.program import PartName, Program, RankProgram, StepPart

FEW = 4
"""Most kernels of an op that are compared with those of others, to be one object where equal. A
module's are one object already, and whoever reads a Program remembers kernels by identity."""
MOST_EVENTS = 2**14
"""Allocations, and frees, that are one object where equal."""
SAVED_TENSORS = "saved_tensors"
"""Role, for a module's unit, of what copies of saved tensors move."""


@lru_cache(maxsize=1024)
def _the_same(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """The first of equal tuples of kernels."""
    return kernels


@lru_cache(maxsize=MOST_EVENTS)
def alloc_of(buffer: Buffer, kind: MemoryKind, nbytes: int) -> Alloc:
    """The same allocation for every micro-batch: replays compare these by identity first."""
    return Alloc(buffer, kind, nbytes)


@lru_cache(maxsize=MOST_EVENTS)
def free_of(buffer: Buffer) -> Free:
    """The same free for every micro-batch."""
    return Free(buffer)


@dataclass(slots=True)
class StepBuilder:
    """The ops of one phase, in issue order. `issue` appends one and returns its index, for others
    to wait on."""

    ops: list[Op] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    _sent: list[int] = field(default_factory=list)
    """Copies of checkpoints' inputs to the host whose backward is yet to come."""
    _fetched: list[int] = field(default_factory=list)
    """The last copy of a checkpoint's inputs to the device."""
    _begun: tuple[int, Hashable] = (0, None)
    """The first op of the last micro-batch, and the state in which it began."""
    repeats: dict[Hashable, tuple[list[Op], list[StepPart]]] = field(default_factory=dict)
    """Micro-batches that leave the state as it was, by that state."""

    def __copy__(self) -> StepBuilder:
        """The step so far, to be ended in another way."""
        return replace(
            self, ops=[*self.ops], parts=[*self.parts], _sent=[*self._sent],
            _fetched=[*self._fetched],
        )

    def begin(self, part: PartName, *, micro_batch: int = 0) -> None:
        """Begin a part of the step: all ops from here on belong to it."""
        self.parts.append(StepPart(part, len(self.ops), micro_batch))

    def repeat(self, micro_batch: int, state: Hashable, *events: list[int]) -> int:
        """Issue this micro-batch as an earlier one that began and ended in the same state. Returns
        the number of ops issued, 0 where it is to be planned.

        `state`: all that its ops depend on, without the `events`, earlier ops to wait for. Those
        are replaced by this micro-batch's own. The first micro-batch is like no other.
        """
        begin, streams = len(self.ops), (op.stream for op in reversed(self.ops))
        last = next((back for back, stream in enumerate(streams) if stream == "compute"), begin)
        events = (*events, self._sent, self._fetched)
        state = state, last, *(tuple([begin - at for at in each]) for each in events)
        (start, before), self._begun = self._begun, (begin, state)
        if micro_batch > 1 and before == state:
            parts = [part for part in self.parts if part.start >= start]
            self.repeats[state] = self.ops[start:], parts
        if not micro_batch or state not in self.repeats:
            return 0
        ops, parts = self.repeats[state]
        by = begin - ops[0].index
        self.ops += [_later(op, by, micro_batch) for op in ops]
        self.parts += [StepPart(part.name, part.start + by, micro_batch) for part in parts]
        for each in events:
            each[:] = [at + len(ops) for at in each]
        return len(ops)

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
        host: Iterable[HostEvent] = (),
    ) -> int:
        """Append an op and return its index; repeated waits count once."""
        index = len(self.ops)
        waits = tuple(waits)
        if len(waits) > 1:
            waits = tuple(sorted(set(waits)))
        if 0 < len(kernels) <= FEW:
            kernels = _the_same(kernels)
        # Each field by its place: by keyword an Op takes three times as long to make.
        op = Op(
            index, kind, unit, stream, waits, group, nbytes, root, dtype, micro_batch, reads,
            kernels, tuple(memory), tuple(host),
        )
        self.ops.append(op)
        return index


    def copy_saved(self, unit: str, copies: HostCopies, *, micro_batch: int) -> None:
        """Copy saved tensors of a module between compute: to the host behind its forward, to the
        device in front of its backward. The host waits for copies of pageable memory.
        """
        if copies.kernels and not copies.beside:
            pageable = copies.kernels[-1].operator.endswith(PAGEABLE)
            self._copy(unit, copies, "host" if pageable else "compute", micro_batch)

    def save_inputs(self, unit: str, copies: HostCopies, *, micro_batch: int) -> list[int]:
        """Begin to copy inputs of a checkpoint to the host, in front of its forward. Returns the
        copies after which that may free others."""
        if not copies.beside:
            return []
        if copies.host:
            self._sent.append(self._copy(unit, copies, "to_host", micro_batch))
        return [self._sent[-1 - KEPT]] if copies.awaits else []

    def fetch_inputs(self, unit: str, copies: HostCopies, *, micro_batch: int) -> list[int]:
        """Begin to fetch inputs for a later backward, in front of this one. Returns the copies
        after which this one has its own, and may free them."""
        if not (copies.beside and copies.awaits):
            return []
        waits = [self._sent.pop(), *self._fetched]
        if copies.kernels:
            self._fetched = [self._copy(unit, copies, "to_device", micro_batch)]
        elif copies.host:
            self.issue(
                "free", buffer_of(unit, SAVED_TENSORS), stream="host", micro_batch=micro_batch,
                host=copies.host,
            )
        return waits

    def _copy(self, unit: str, copies: HostCopies, stream: Stream, micro_batch: int) -> int:
        """A copy of saved tensors; on another stream than compute behind what is there."""
        before = (op.index for op in reversed(self.ops) if op.stream == "compute")
        return self.issue(
            "copy", buffer_of(unit, SAVED_TENSORS), stream=stream,
            waits=[] if stream == "compute" else list(islice(before, 1)),
            micro_batch=micro_batch, kernels=copies.kernels, memory=copies.memory, host=copies.host,
        )


def _later(op: Op, by: int, micro_batch: int) -> Op:
    """`op` once more, `by` ops later, in another micro-batch; those of none have the number 0."""
    return Op(
        op.index + by, op.kind, op.unit, op.stream, tuple([wait + by for wait in op.waits]),
        op.group, op.nbytes, op.root, op.dtype, op.micro_batch and micro_batch, op.reads,
        op.kernels, op.memory, op.host,
    )


def saves_tensors(op: Op) -> bool:
    """True for a copy of saved tensors between device and host."""
    return role_of(op.unit) == SAVED_TENSORS


def spmd(
    mesh: Mesh, *, construction: StepBuilder, first: StepBuilder, steady: StepBuilder,
    second: Iterable[Op] = ()
) -> Program:
    """A Program in which every rank runs the same ops."""
    rank = rank_program(construction.ops, first=first, steady=steady, second=second)
    return Program(mesh=mesh, ranks=(rank,), assignment=(0,) * mesh.world_size)


def rank_program(
    construction: Iterable[Op], *, first: StepBuilder, steady: StepBuilder,
    second: Iterable[Op] = ()
) -> RankProgram:
    """The program of one rank: both steps with their parts, and the ops of `second` between them.
    """
    return RankProgram(
        construction=tuple(construction),
        first=tuple(first.ops),
        steady=tuple(steady.ops),
        second=tuple(second),
        first_parts=tuple(first.parts),
        steady_parts=tuple(steady.parts),
    )
