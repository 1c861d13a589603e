"""The ledger of live bytes: allocated memory follows the order in which the host issues ops, so it
needs no clock.

It knows no time, no device and no strategy. `zsim.ir.ledger_replay` replays a whole rank program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zsim.errors import ProgramError
from zsim.ir.ops import MEMORY_KINDS, Alloc, MemoryKind, Op


@dataclass(slots=True)
class Ledger:
    """The live buffers at one moment, with the sums of their bytes by kind and in all.

    >>> ledger = Ledger()
    >>> ledger.allocate(Alloc("weight", "parameters", 512))
    >>> ledger.allocate(Alloc("out", "activations", 64))
    >>> ledger.free("weight")
    >>> ledger.allocated, ledger.by_kind["activations"]
    (64, 64)
    """

    live: dict[str, Alloc] = field(default_factory=dict)
    by_kind: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_KINDS, 0))
    allocated: int = 0

    def copy(self) -> Ledger:
        """A copy, to be compared with a later moment."""
        return Ledger(dict(self.live), dict(self.by_kind), self.allocated)

    def allocate(self, event: Alloc) -> None:
        """`event.buffer` begins to live; ProgramError when it lives already."""
        if event.buffer in self.live:
            raise allocated_again(event.buffer)
        self.live[event.buffer] = event
        self.by_kind[event.kind] += event.nbytes
        self.allocated += event.nbytes

    def free(self, buffer: str) -> None:
        """`buffer` stops living; ProgramError when it does not live."""
        event = self.live.pop(buffer, None)
        if event is None:
            raise not_live(buffer)
        self.by_kind[event.kind] -= event.nbytes
        self.allocated -= event.nbytes

    def apply(self, op: Op) -> None:
        """All allocations and frees of `op`, in order."""
        for event in op.memory:
            if isinstance(event, Alloc):
                self.allocate(event)
            else:
                self.free(event.buffer)


def begins_with(ops: Sequence[Op], others: Sequence[Op]) -> bool:
    """True where the first of `ops` allocate and free what all `others` do, op by op."""
    return len(ops) >= len(others) and all(
        (op.memory is other.memory or op.memory == other.memory) and op.stream == other.stream
        for op, other in zip(ops, others, strict=False)
    )


def allocated_again(buffer: str) -> ProgramError:
    """The error of an allocation of a live buffer."""
    return ProgramError(
        where=buffer, expected="a buffer that is not live", found="a second allocation"
    )


def not_live(buffer: str) -> ProgramError:
    """The error of a free of a buffer that is not live."""
    return ProgramError(where=buffer, expected="a live buffer", found="it is freed")


def label(op: Op) -> str:
    """The name of an op in messages: "backward blocks.3"."""
    return f"{op.kind} {op.unit}"


def during(op: Op, phase: str, error: ProgramError) -> ProgramError:
    """`error` with the op in which it happened."""
    where = f"{phase} op {op.index} ({label(op)})"
    return ProgramError(where=where, expected=error.expected, found=f"{error.where}: {error.found}")
