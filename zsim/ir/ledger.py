"""The ledger of live bytes: allocated memory follows the order in which the host issues ops, so it
needs no clock.

It reads a RankProgram and answers in MemoryRecords, to the byte. It knows no time, no device and no
strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zsim.errors import ProgramError
from zsim.ir.ops import MEMORY_KINDS, Alloc, MemoryKind, Op
from zsim.ir.program import PHASES, SECOND, Part, PhaseName, RankProgram
from zsim.ir.run import MemoryRecord, PartRecord

HELD: tuple[MemoryKind, ...] = ("parameters", "gradients", "optimizer_states")
"""The kinds that a rank holds from step to step, which a real run can tell apart by its tensors."""


@dataclass(slots=True)
class Ledger:
    """What is live at one moment: each buffer's kind and size, and the sums of both."""

    live: dict[str, Alloc] = field(default_factory=dict)
    by_kind: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_KINDS, 0))
    allocated: int = 0

    def copy(self) -> Ledger:
        """What is live now, to be compared with a later moment."""
        return Ledger(dict(self.live), dict(self.by_kind), self.allocated)

    def allocate(self, event: Alloc) -> None:
        """`event.buffer` begins to live; ProgramError when it lives already."""
        if event.buffer in self.live:
            raise _allocated_again(event.buffer)
        self.live[event.buffer] = event
        self.by_kind[event.kind] += event.nbytes
        self.allocated += event.nbytes

    def free(self, buffer: str) -> None:
        """`buffer` stops living; ProgramError when it does not live."""
        event = self.live.pop(buffer, None)
        if event is None:
            raise _not_live(buffer)
        self.by_kind[event.kind] -= event.nbytes
        self.allocated -= event.nbytes

    def apply(self, op: Op) -> None:
        """All allocations and frees of `op`, in order."""
        for event in op.memory:
            if isinstance(event, Alloc):
                self.allocate(event)
            else:
                self.free(event.buffer)


def _allocated_again(buffer: str) -> ProgramError:
    return ProgramError(
        where=buffer, expected="a buffer that is not live", found="it is allocated again"
    )


def _not_live(buffer: str) -> ProgramError:
    return ProgramError(where=buffer, expected="a live buffer", found="it is freed")


def replay(program: RankProgram, *, timeline: bool = True) -> Mapping[PhaseName, MemoryRecord]:
    """Start, peak and end of each phase and of its parts in allocated bytes, the peak's split by
    kind; `timeline` adds each op.

    ProgramError, which names the op, where a buffer is allocated twice or freed without being live.
    """
    ledger, passes, records = Ledger(), _shared(program), dict[PhaseName, MemoryRecord]()
    seen: _Passes | None = None
    for phase in PHASES:
        ops, parts = program.phase(phase), program.parts(phase)
        _once(ledger, program.before(phase))
        walk = _Walk(ledger.allocated, _Summit(ledger.allocated, dict(ledger.by_kind)))
        shared = ops[: 0 if phase == "construction" else passes]
        if seen is None or not seen.again(walk, ledger):
            before = ledger.copy()
            _follow(walk, ledger, shared, phase, parts=parts, timeline=timeline)
            seen = _Passes(shared, before, ledger.copy(), walk.copy()) if shared else None
        _follow(walk, ledger, ops[len(shared) :], phase, parts=parts, timeline=timeline)
        walk.parts += [
            _PartWalk(part, ledger.allocated, ledger.allocated)
            for part in parts
            if part.start >= len(ops)
        ]
        records[phase] = walk.record(ledger)
    return records


def _once(ledger: Ledger, ops: tuple[Op, ...]) -> None:
    """Follow ops between two phases, of which there is no record."""
    for op in ops:
        try:
            ledger.apply(op)
        except ProgramError as error:
            raise _during(op, SECOND, error) from None


def _shared(program: RankProgram) -> int:
    """How many ops both steps begin with: the very same ones, up to the optimizer's where a
    strategy issues passes once."""
    first, steady = program.first, program.steady
    differ = (
        place
        for place, (one, other) in enumerate(zip(first, steady, strict=False))
        if one is not other
    )
    count = next(differ, min(len(first), len(steady)))
    parts = (
        [part for part in parts if part.start < count]
        for parts in (program.first_parts, program.steady_parts)
    )
    return count if next(parts) == next(parts) else 0


def label(op: Op) -> str:
    """An op in a word or two: "backward blocks.3"."""
    return f"{op.kind} {op.unit}"


@dataclass(slots=True)
class _Summit:
    """The highest point so far. Its split by kind is copied once per summit, not once per step of
    the climb."""

    peak: int
    split: dict[MemoryKind, int]
    op: Op | None = None


@dataclass(slots=True)
class _PartWalk:
    """A part of a phase so far."""

    part: Part
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
        """This walk, to be compared with a later one."""
        return _Walk(
            self.start, replace(self.summit), list(self.points), self.held, self.lifted_parts(0)
        )

    def lifted_parts(self, lift: int) -> list[_PartWalk]:
        """Its parts with as many bytes more."""
        return [_PartWalk(one.part, one.start + lift, one.peak + lift) for one in self.parts]

    def record(self, ledger: Ledger) -> MemoryRecord:
        """The phase, which ends with `ledger`."""
        return MemoryRecord(
            start_bytes=self.start, peak_bytes=self.summit.peak, end_bytes=ledger.allocated,
            peak_at=label(self.summit.op) if self.summit.op else "start",
            by_kind={str(kind): nbytes for kind, nbytes in self.summit.split.items()},
            held={str(kind): nbytes for kind, nbytes in self.held.items()},
            timeline=tuple(self.points),
            parts=tuple(
                PartRecord(one.part.name, one.part.micro_batch, one.start, one.peak)
                for one in self.parts
            ),
        )


@dataclass(frozen=True, slots=True)
class _Passes:
    """Ops that have been followed once, with the ledger `before` and `after`: the steady phase
    begins as the first one did.

    What lives besides since then (optimizer states) only lifts everything.
    """

    ops: tuple[Op, ...]
    before: Ledger
    after: Ledger
    walk: _Walk

    def again(self, walk: _Walk, ledger: Ledger) -> bool:
        """Follow the ops once more, if they find what they found before and touch nothing else;
        otherwise do nothing."""
        besides = ledger.live.keys() - self.before.live.keys()
        if not self.before.live.items() <= ledger.live.items() or not besides.isdisjoint(
            self._allocated()
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

    def _allocated(self) -> list[str]:
        return [event.buffer for op in self.ops for event in op.memory if type(event) is Alloc]


def _lifted(split: dict[MemoryKind, int], lifts: dict[MemoryKind, int]) -> dict[MemoryKind, int]:
    return {kind: nbytes + lifts[kind] for kind, nbytes in split.items()}


def _follow(
    walk: _Walk, ledger: Ledger, ops: tuple[Op, ...], phase: PhaseName, *, parts: tuple[Part, ...],
    timeline: bool,
) -> None:
    """Go on over `ops`. Tens of thousands of events pass here, so the ledger and the summit are
    kept in local names."""
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
                    raise _during(op, phase, _allocated_again(buffer))
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
                made = live.pop(event.buffer, None)
                if made is None:
                    raise _during(op, phase, _not_live(event.buffer))
                by_kind[made.kind] -= made.nbytes
                allocated -= made.nbytes
        if op.kind == "optimizer":
            walk.held = {kind: by_kind[kind] for kind in HELD}
        if timeline:
            points.append((label(op), allocated))
    if climbing:
        summit.split = dict(by_kind)
    summit.peak, ledger.allocated = peak, allocated
    if walk.parts:
        walk.parts[-1].peak = high


def _during(op: Op, phase: str, error: ProgramError) -> ProgramError:
    """`error` with the op in which it happened."""
    where = f"{phase} op {op.index} ({label(op)})"
    return ProgramError(where=where, expected=error.expected, found=f"{error.where}: {error.found}")
