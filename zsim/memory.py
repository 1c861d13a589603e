"""The ledger of live bytes: allocated memory follows the order in which the host issues ops, so it needs no clock.

It reads a RankProgram and answers in MemoryRecords, to the byte. It knows no time, no device and no strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zsim.errors import ProgramError
from zsim.ops import MEMORY_KINDS, Alloc, MemoryKind, Op
from zsim.program import PHASES, PhaseName, RankProgram
from zsim.run import MemoryRecord

HELD: tuple[MemoryKind, ...] = ("parameters", "gradients", "optimizer_states")
"""The kinds that a rank holds from step to step, which a real run can tell apart by its tensors."""


@dataclass(slots=True)
class Ledger:
    """What is live at one moment: each buffer's kind and size, and the sums of both."""

    live: dict[str, Alloc] = field(default_factory=dict)
    by_kind: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_KINDS, 0))
    allocated: int = 0

    def allocate(self, event: Alloc) -> None:
        """`event.buffer` begins to live; ProgramError when it lives already."""
        if event.buffer in self.live:
            raise ProgramError(where=event.buffer, expected="a buffer that is not live", found="it is allocated again")
        self.live[event.buffer] = event
        self.by_kind[event.kind] += event.nbytes
        self.allocated += event.nbytes

    def free(self, buffer: str) -> None:
        """`buffer` stops living; ProgramError when it does not live."""
        event = self.live.pop(buffer, None)
        if event is None:
            raise ProgramError(where=buffer, expected="a live buffer", found="it is freed")
        self.by_kind[event.kind] -= event.nbytes
        self.allocated -= event.nbytes

    def apply(self, op: Op) -> None:
        """All allocations and frees of `op`, in order."""
        for event in op.memory:
            if isinstance(event, Alloc):
                self.allocate(event)
            else:
                self.free(event.buffer)


def replay(program: RankProgram, *, timeline: bool = True) -> Mapping[PhaseName, MemoryRecord]:
    """Start, peak and end of each phase in allocated bytes, the peak's split by kind; `timeline` adds each op.

    ProgramError, which names the op, where a buffer is allocated twice or freed without being live.
    """
    ledger = Ledger()
    return {phase: _phase(ledger, program.phase(phase), phase, timeline=timeline) for phase in PHASES}


def label(op: Op) -> str:
    """An op in a word or two: "backward blocks.3"."""
    return f"{op.kind} {op.unit}"


@dataclass(slots=True)
class _Summit:
    """The highest point so far. Its split by kind is copied once per summit, not once per step of the climb."""

    peak: int
    split: dict[MemoryKind, int]
    op: Op | None = None
    climbing: bool = False

    def leave(self, ledger: Ledger) -> None:
        """Note the split before anything is freed."""
        self.split, self.climbing = dict(ledger.by_kind), False


def _phase(ledger: Ledger, ops: tuple[Op, ...], phase: PhaseName, *, timeline: bool) -> MemoryRecord:
    start, points = ledger.allocated, []
    held: Mapping[str, int] = {}
    summit = _Summit(start, dict(ledger.by_kind))
    for op in ops:
        if op.memory:
            try:
                _apply(ledger, op, summit)
            except ProgramError as error:
                where = f"{phase} op {op.index} ({label(op)})"
                raise ProgramError(where=where, expected=error.expected, found=f"{error.where}: {error.found}") from None
        if op.kind == "optimizer":
            held = {kind: ledger.by_kind[kind] for kind in HELD}
        if timeline:
            points.append((label(op), ledger.allocated))
    if summit.climbing:
        summit.leave(ledger)
    return MemoryRecord(
        start_bytes=start,
        peak_bytes=summit.peak,
        end_bytes=ledger.allocated,
        peak_at=label(summit.op) if summit.op else "start",
        by_kind={str(kind): nbytes for kind, nbytes in summit.split.items()},
        held=held,
        timeline=tuple(points),
    )


def _apply(ledger: Ledger, op: Op, summit: _Summit) -> None:
    for event in op.memory:
        if isinstance(event, Alloc):
            ledger.allocate(event)
            if ledger.allocated > summit.peak:
                summit.peak, summit.op, summit.climbing = ledger.allocated, op, True
        else:
            if summit.climbing:
                summit.leave(ledger)
            ledger.free(event.buffer)
