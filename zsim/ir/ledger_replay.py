"""The replay of a rank program's memory: the same answer as `Ledger.apply`, inlined for speed.

Tens of thousands of events pass here. The ledger and the highest point are therefore local names.
Passes common to the first and the steady step are followed once, and so are micro-batches that find
the same buffers. A test (tests/zsim/ir/test_ledger.py) holds replay and ledger equal, on programs
that hypothesis draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from zsim.errors import ProgramError
from zsim.ir.ledger import Ledger, allocated_again, begins_with, during, label, not_live
from zsim.ir.ops import Alloc, MemoryKind, Op
from zsim.ir.program import (
    PHASES,
    SECOND,
    PhaseName,
    RankProgram,
    StepPart,
    begin_alike,
)
from zsim.ir.run import MemoryRecord, PartRecord

HELD: tuple[MemoryKind, ...] = ("parameters", "gradients", "optimizer_states")
"""Memory kinds that live from step to step; a real run tells them apart by its tensors."""


def replay(program: RankProgram, *, timeline: bool = True) -> Mapping[PhaseName, MemoryRecord]:
    """Allocated bytes of each phase and of its parts: start, peak and end, and the peak by kind.

    `timeline` adds the bytes after each op. ProgramError, which names the op, where a buffer is
    allocated twice or freed without being live.
    """
    return replay_each((program,), timeline=timeline)[0]


def replay_each(
    programs: Iterable[RankProgram], *, timeline: bool = True
) -> list[Mapping[PhaseName, MemoryRecord]]:
    """`replay` of each; passes that are the same objects are followed once for all."""
    records, known = list[Mapping[PhaseName, MemoryRecord]](), None
    for program in programs:
        own, known = _replayed(program, known, timeline=timeline)
        records.append(own)
    return records


def _replayed(
    program: RankProgram, known: _Passes | None, *, timeline: bool
) -> tuple[Mapping[PhaseName, MemoryRecord], _Passes | None]:
    """The records of `program`, and the passes that it follows if they are not `known`."""
    ledger, records = Ledger(), dict[PhaseName, MemoryRecord]()
    num_shared = begin_alike(program.first, program.steady)
    for phase in PHASES:
        ops, parts = program.phase(phase), program.parts(phase)
        _apply_all(ledger, program.before(phase))
        walk = _Walk(ledger.allocated, _Summit(ledger.allocated, dict(ledger.by_kind)))
        shared = ops[: 0 if phase == "construction" else num_shared]
        if shared and not (known and known.again(shared, parts, walk, ledger)):
            before = ledger.copy()
            _follow_each(walk, ledger, shared, phase, parts=parts, timeline=timeline)
            known = _Passes(shared, before, ledger.copy(), walk.copy())
        _follow_each(
            walk, ledger, ops[len(shared) :], phase, parts=parts, timeline=timeline
        )
        walk.parts += [
            _PartWalk(part, ledger.allocated, ledger.allocated)
            for part in parts
            if part.start >= len(ops)
        ]
        records[phase] = walk.record(ledger)
    return records, known


def _apply_all(ledger: Ledger, ops: tuple[Op, ...]) -> None:
    """Apply ops between two phases, which have no record."""
    for op in ops:
        try:
            ledger.apply(op)
        except ProgramError as error:
            raise during(op, SECOND, error) from None


@dataclass(slots=True)
class _Summit:
    """The highest point so far. The split by kind is copied once per summit, not once per
    allocation of the climb."""

    peak: int
    split: dict[MemoryKind, int]
    op: Op | None = None


@dataclass(slots=True)
class _PartWalk:
    """A part of a phase so far."""

    part: StepPart
    start: int
    peak: int


@dataclass(slots=True)
class _Walk:
    """A phase so far."""

    start: int
    summit: _Summit
    points: list[tuple[str, int]] = field(default_factory=list)
    held: dict[MemoryKind, int] = field(default_factory=dict)
    parts: list[_PartWalk] = field(default_factory=list)

    def copy(self) -> _Walk:
        """A copy, to be compared with a later walk."""
        return _Walk(
            self.start, replace(self.summit), list(self.points), self.held, self.lifted_parts(0)
        )

    def lifted_parts(self, lift: int) -> list[_PartWalk]:
        """The parts, raised by `lift` bytes."""
        return [_PartWalk(each.part, each.start + lift, each.peak + lift) for each in self.parts]

    def record(self, ledger: Ledger) -> MemoryRecord:
        """The record of the phase, at whose end the ledger is `ledger`."""
        return MemoryRecord(
            start_bytes=self.start, peak_bytes=self.summit.peak, end_bytes=ledger.allocated,
            peak_at=label(self.summit.op) if self.summit.op else "start",
            by_kind={str(kind): nbytes for kind, nbytes in self.summit.split.items()},
            held={str(kind): nbytes for kind, nbytes in self.held.items()},
            timeline=tuple(self.points),
            parts=tuple(
                PartRecord(each.part.name, each.part.micro_batch, each.start, each.peak)
                for each in self.parts
            ),
        )


@dataclass(frozen=True)
class _Passes:
    """Ops that both steps begin with, followed once, with the ledger `before` and `after` them.

    Buffers that live besides in the steady step (optimizer states) only lift its bytes.
    """

    ops: tuple[Op, ...]
    before: Ledger
    after: Ledger
    walk: _Walk

    def again(
        self, ops: tuple[Op, ...], parts: tuple[StepPart, ...], walk: _Walk, ledger: Ledger
    ) -> bool:
        """True when the `ops`, which are these, were applied again: the buffers live before them
        are live now, and no others that they allocate. Otherwise nothing is done."""
        own = [part for part in parts if part.start < len(ops)]
        if own != [each.part for each in self.walk.parts] or not (
            begin_alike(ops, self.ops) == len(ops) == len(self.ops)
        ):
            return False
        besides = ledger.live.keys() - self.before.live.keys()
        if not self.before.live.items() <= ledger.live.items() or not besides.isdisjoint(
            self._allocated
        ):
            return False
        lift = ledger.allocated - self.before.allocated
        lifts = {
            kind: nbytes - self.before.by_kind[kind] for kind, nbytes in ledger.by_kind.items()
        }
        walk.summit = replace(
            self.walk.summit, peak=self.walk.summit.peak + lift,
            split=_lifted(self.walk.summit.split, lifts),
        )
        walk.points = [(name, nbytes + lift) for name, nbytes in self.walk.points]
        walk.held = _lifted(self.walk.held, lifts)
        walk.parts = self.walk.lifted_parts(lift)
        ledger.live = self.after.live | {buffer: ledger.live[buffer] for buffer in besides}
        ledger.by_kind, ledger.allocated = (
            _lifted(self.after.by_kind, lifts), self.after.allocated + lift,
        )
        return True

    @cached_property
    def _allocated(self) -> frozenset[str]:
        distinct = {id(op.memory): op.memory for op in self.ops}.values()
        return frozenset([
            event.buffer for events in distinct for event in events if type(event) is Alloc
        ])


def _lifted(split: dict[MemoryKind, int], lifts: dict[MemoryKind, int]) -> dict[MemoryKind, int]:
    return {kind: nbytes + lifts[kind] for kind, nbytes in split.items()}


def _follow_each(
    walk: _Walk, ledger: Ledger, ops: tuple[Op, ...], phase: PhaseName, *,
    parts: tuple[StepPart, ...], timeline: bool,
) -> None:
    """Follow `ops` by micro-batches. One that finds the buffers of the one before, and begins with
    its allocations and frees, has its bytes there: they are not followed again.

    A `timeline` has the points of all.
    """
    start = ops[0].index if ops else 0
    begins = [part.start - start for part in parts if part.name == "forward"]
    inside = [] if timeline else [begin for begin in begins if 0 < begin < len(ops)]
    live, before, known = dict[str, Alloc](), tuple[Op, ...](), dict[int, _PartWalk]()
    for begin, end in pairwise((0, *inside, len(ops))):
        rest, count = ops[begin:end], len(walk.parts)
        own = {part.start - start - begin: part for part in parts}
        again = {at: part for at, part in own.items() if 0 <= at < len(before)}
        is_as_before = before and live == ledger.live and again.keys() == known.keys()
        if is_as_before and begins_with(rest, before):
            walk.parts += [
                _PartWalk(part, known[at].start, known[at].peak) for at, part in again.items()
            ]
            rest = rest[len(before) :]
        elif inside:
            live = dict(ledger.live)
        _follow(walk, ledger, rest, phase, parts=parts, timeline=timeline)
        before = ops[begin:end]
        known = {each.part.start - start - begin: each for each in walk.parts[count:]}


def _follow(
    walk: _Walk, ledger: Ledger, ops: tuple[Op, ...], phase: PhaseName, *,
    parts: tuple[StepPart, ...], timeline: bool,
) -> None:
    """Apply `ops` to `ledger` and record them in `walk`."""
    live, by_kind, allocated = ledger.live, ledger.by_kind, ledger.allocated
    summit, climbing, points = walk.summit, False, walk.points
    peak, high = summit.peak, walk.parts[-1].peak if walk.parts else walk.start
    begins = {part.start: part for part in parts}
    for op in ops:
        if op.index in begins:
            if walk.parts:
                walk.parts[-1].peak = high
            walk.parts.append(_PartWalk(begins[op.index], allocated, allocated))
            high = allocated
        for event in op.memory:
            if type(event) is Alloc:
                buffer, nbytes = event.buffer, event.nbytes
                if buffer in live:
                    raise during(op, phase, allocated_again(buffer))
                live[buffer] = event
                by_kind[event.kind] += nbytes
                allocated += nbytes
                if allocated > high:
                    high = allocated
                    if allocated > peak:
                        peak, summit.op, climbing = allocated, op, True
            else:
                if climbing:
                    summit.split, climbing = dict(by_kind), False
                freed = live.pop(event.buffer, None)
                if freed is None:
                    raise during(op, phase, not_live(event.buffer))
                by_kind[freed.kind] -= freed.nbytes
                allocated -= freed.nbytes
        if op.kind == "optimizer":
            walk.held = {kind: by_kind[kind] for kind in HELD}
        if timeline:
            points.append((label(op), allocated))
    if climbing:
        summit.split = dict(by_kind)
    summit.peak, ledger.allocated = peak, allocated
    if walk.parts:
        walk.parts[-1].peak = high
