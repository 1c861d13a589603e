"""The ledger of live bytes: allocated memory follows the order in which the host issues ops, so it needs no clock.

It reads a RankProgram and answers in MemoryRecords, to the byte. It knows no time, no device and no strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zsim.errors import ProgramError
from zsim.program import MEMORY_KINDS, PHASES, Alloc, MemoryKind, Op, PhaseName, RankProgram
from zsim.run import MemoryRecord


@dataclass(slots=True)
class Ledger:
    """What is live at one moment: each buffer's kind and size, and the sums of both."""

    live: dict[str, Alloc] = field(default_factory=dict)
    by_kind: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_KINDS, 0))
    allocated: int = 0

    def allocate(self, event: Alloc, *, where: str) -> None:
        """`event.buffer` begins to live; ProgramError when it lives already."""
        if event.buffer in self.live:
            found = f"{event.buffer} allocated again"
            raise ProgramError(where=where, expected="a buffer that is not live", found=found)
        self.live[event.buffer] = event
        self.by_kind[event.kind] += event.nbytes
        self.allocated += event.nbytes

    def free(self, buffer: str, *, where: str) -> None:
        """`buffer` stops living; ProgramError when it does not live."""
        event = self.live.pop(buffer, None)
        if event is None:
            raise ProgramError(where=where, expected="a live buffer", found=f"{buffer} freed")
        self.by_kind[event.kind] -= event.nbytes
        self.allocated -= event.nbytes


def replay(program: RankProgram, *, timeline: bool = True) -> Mapping[PhaseName, MemoryRecord]:
    """Start, peak and end of each phase in allocated bytes, the peak's split by kind; `timeline` adds each op."""
    ledger = Ledger()
    return {phase: _phase(ledger, program.phase(phase), phase, timeline=timeline) for phase in PHASES}


def label(op: Op) -> str:
    """An op in a word or two: "backward blocks.3"."""
    return f"{op.kind} {op.unit}"


def _phase(ledger: Ledger, ops: tuple[Op, ...], phase: PhaseName, *, timeline: bool) -> MemoryRecord:
    start = peak = ledger.allocated
    at, split, points, climbing = "start", dict(ledger.by_kind), [], False
    for op in ops:
        where = f"{phase} op {op.index} ({op.kind} {op.unit})" if op.memory else ""
        for event in op.memory:
            if not isinstance(event, Alloc):
                if climbing:  # the split is copied once per summit, not once per step of the climb
                    split, climbing = dict(ledger.by_kind), False
                ledger.free(event.buffer, where=where)
                continue
            ledger.allocate(event, where=where)
            if ledger.allocated > peak:
                peak, at, climbing = ledger.allocated, label(op), True
        if timeline:
            points.append((label(op), ledger.allocated))
    if climbing:
        split = dict(ledger.by_kind)
    return MemoryRecord(
        start_bytes=start,
        peak_bytes=peak,
        end_bytes=ledger.allocated,
        peak_at=at,
        by_kind={str(kind): nbytes for kind, nbytes in split.items()},
        timeline=tuple(points),
    )
