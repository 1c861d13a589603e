"""Micro-batches that find the same memory: what a rank needs for five, it needs for any number.

The fifth begins where the fourth began: with as many bytes, and with the same blocks in the caching
allocator. Their ops are the same, so each further one does to memory what the fourth did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zsim.engine.equal_micro_batches import FEWEST
from zsim.ir.program import PhaseName, RankProgram
from zsim.ir.run import MemoryRecord

STEPS: tuple[PhaseName, ...] = ("first", "steady")


def micro_batches(program: RankProgram, phase: PhaseName) -> tuple[int, ...]:
    """The first op of each micro-batch of a phase."""
    return tuple(part.start for part in program.parts(phase) if part.name == "forward")


def bytes_repeat(records: Mapping[PhaseName, MemoryRecord]) -> bool:
    """True where, in both steps, the fifth micro-batch begins with the bytes of the fourth."""
    starts = (
        [part.start_bytes for part in records[phase].parts if part.name == "forward"]
        for phase in STEPS
    )
    return all(len(each) == FEWEST and each[3] == each[4] for each in starts)


def repeat(states: Sequence[int], begins: Sequence[int], calls: Iterable[int]) -> bool:
    """True where the fourth of five micro-batches leaves the allocator as it found it, and calls
    the driver in no op. `states` are those at their first ops."""
    return len(states) == FEWEST and states[3] == states[4] and not any(
        begins[3] <= op < begins[4] for op in calls
    )

