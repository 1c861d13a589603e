"""Micro-batches that find the same memory: what a rank needs for five, it needs for any number.

The fifth begins where the fourth began: with as many bytes, and with the same blocks in the caching
allocator. Their ops are the same, so each further one does to memory what the fourth did.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.engine.equal_micro_batches import FEWEST
from zsim.ir.program import PhaseName, RankProgram
from zsim.ir.run import MemoryRecord
from zsim.memory.allocator.reserved import AllocatorRecord

STEPS: tuple[PhaseName, ...] = ("first", "steady")


def begins(program: RankProgram) -> Mapping[PhaseName, tuple[int, ...]]:
    """The first ops of the fourth and the fifth micro-batch, by step; none unless there are five.
    """
    starts = {
        phase: tuple(part.start for part in program.parts(phase) if part.name == "forward")
        for phase in STEPS
    }
    return {phase: ops[3:] for phase, ops in starts.items() if len(ops) == FEWEST}


def bytes_repeat(records: Mapping[PhaseName, MemoryRecord]) -> bool:
    """True where, in both steps, the fifth micro-batch begins with the bytes of the fourth."""
    starts = (
        [part.start_bytes for part in records[phase].parts if part.name == "forward"]
        for phase in STEPS
    )
    return all(len(each) == FEWEST and each[3] == each[4] for each in starts)


def blocks_repeat(records: Mapping[PhaseName, AllocatorRecord]) -> bool:
    """True where, in both steps, the allocator is in one state at the two ops of `begins`."""
    return all(
        len(states) == 2 and states[0] == states[1]
        for states in (records[phase].states for phase in STEPS)
    )
