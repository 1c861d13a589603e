"""The ledger of host memory: bytes of offloaded states, pinned and pageable, in the order of issue.

It knows no node: how many ranks share a host's memory is the verdict's (`zsim.memory.host`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zsim.errors import ProgramError
from zsim.ir.ledger import allocated_again, label, not_live
from zsim.ir.ops import Free, HostAlloc, Op
from zsim.ir.program import PHASES, PhaseName, RankProgram

OFFLOADED = "offloaded"
"""The kind under which a Run has the bytes that a rank holds in host memory."""
SAVED = "saved_on_host"
"""The kind under which a Run has the most bytes of saved tensors in host memory at once."""
ON_HOST = (OFFLOADED, SAVED)
"""The kinds of what a Run tells of host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """Host memory of one rank in a phase: the most bytes at once, those by kind, and the bytes at
    its end. The most that are pinned at once, and the most of activations, are apart.

    torch rounds each pinned block up to a power of two; `rounding_bytes` come to the pinned ones.
    The most that are locked for drives at once, without torch, are `locked_bytes`.
    """

    peak_bytes: int
    pinned_bytes: int
    locked_bytes: int
    rounding_bytes: int
    saved_bytes: int
    end_bytes: int
    by_kind: Mapping[str, int]


@dataclass(slots=True)
class _Walk:
    live: dict[str, HostAlloc] = field(default_factory=dict)
    by_kind: Counter[str] = field(default_factory=Counter)
    allocated: int = 0
    pinned: int = 0
    locked: int = 0
    rounded: int = 0

    def follow(self, ops: Iterable[Op]) -> HostRecord:
        """The record of `ops`; ProgramError where a buffer lives twice or is freed without living.
        """
        peak, most_pinned, split = self.allocated, self.pinned, dict(self.by_kind)
        most_saved, most_rounded = self.by_kind["activations"], self.rounded
        most_locked = self.locked
        for op in ops:
            for event in op.host:
                if isinstance(event, Free):
                    self._free(event, op)
                    continue
                self._allocate(event, op)
                most_pinned = max(most_pinned, self.pinned)
                most_rounded = max(most_rounded, self.rounded)
                most_locked = max(most_locked, self.locked)
                most_saved = max(most_saved, self.by_kind["activations"])
                if self.allocated > peak:
                    peak, split = self.allocated, dict(self.by_kind)
        return HostRecord(
            peak_bytes=peak, pinned_bytes=most_pinned, locked_bytes=most_locked,
            rounding_bytes=most_rounded - most_pinned,
            saved_bytes=most_saved, end_bytes=self.allocated,
            by_kind={kind: nbytes for kind, nbytes in split.items() if nbytes},
        )

    def _allocate(self, event: HostAlloc, op: Op) -> None:
        if event.buffer in self.live:
            raise _during(op, allocated_again(event.buffer))
        self.live[event.buffer] = event
        self._add(event, 1)

    def _free(self, event: Free, op: Op) -> None:
        made = self.live.pop(event.buffer, None)
        if made is None:
            raise _during(op, not_live(event.buffer))
        self._add(made, -1)

    def _add(self, event: HostAlloc, sign: int) -> None:
        nbytes = sign * event.nbytes
        self.by_kind[event.kind] += nbytes
        self.allocated += nbytes
        self.locked += nbytes * event.locked
        if event.pinned:
            self.pinned += nbytes
            self.rounded += sign * pinned_block(event.nbytes)


def pinned_block(nbytes: int) -> int:
    """Bytes of the block that torch pins for so many (ATen/core/CachingHostAllocator.h)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def replay_host(program: RankProgram) -> Mapping[PhaseName, HostRecord]:
    """Host memory of each phase; all 0 of a Program that offloads nothing. ProgramError as of
    `zsim.ir.ledger_replay.replay`."""
    walk, records = _Walk(), dict[PhaseName, HostRecord]()
    for phase in PHASES:
        walk.follow(program.before(phase))
        records[phase] = walk.follow(program.phase(phase))
    return records


def _during(op: Op, error: ProgramError) -> ProgramError:
    return ProgramError(
        where=f"op {op.index} ({label(op)})", expected=error.expected,
        found=f"{error.where} in host memory: {error.found}",
    )
