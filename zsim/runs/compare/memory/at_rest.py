"""Memory at rest: allocated bytes of a rank after construction, and at both ends of its first and
its steady step.

Nothing is in flight there, on any backend, so that the level is compared to the byte. A buffer that
is never freed stays within the bound of any peak, and shows here. A leak is a step that grows by
more bytes than predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.ir.run import MemoryRecord
from zsim.runs.compare.check import Check

NAME = "memory at rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory of a phase of a rank, predicted and measured."""

    rank: int
    name: str
    predicted: MemoryRecord
    measured: MemoryRecord

    @property
    def where(self) -> str:
        """The rank and the phase, as text."""
        return f"rank {self.rank}, {self.name}"

    @property
    def leak(self) -> int:
        """Bytes by which the phase grows more than predicted."""
        growth = self.measured.end_bytes - self.measured.start_bytes
        return growth - (self.predicted.end_bytes - self.predicted.start_bytes)


@dataclass(frozen=True, slots=True)
class _Level:
    where: str
    predicted: int
    measured: int


def compare_rest(phases: Sequence[PhaseMemory]) -> Check:
    """The check of every level at rest, exact to the byte; its detail names a leaking steady step
    first."""
    levels = [level for phase in phases for level in _levels(phase)]
    other = next((level for level in levels if level.predicted != level.measured), None)
    if other is None:
        total = len(levels)
        held = levels[-1].measured
        detail = (
            f"exact    {total} of {total} starts and ends of phases, {held:,} B from step to step"
        )
        return Check(
            name=NAME, status="ok", predicted=levels[-1].predicted, measured=held,
            relative_error=0.0, detail=detail,
        )
    alike = sum(level.predicted == level.measured for level in levels)
    leaking = next((phase for phase in phases if phase.name == "steady" and phase.leak > 0), None)
    leak = (
        f"{leaking.where}: a leak, the step ends {leaking.leak:,} B higher than it began; "
        if leaking
        else ""
    )
    detail = (
        f"{leak}{alike} of {len(levels)} exact; {other.where}: predicted {other.predicted:,} B, "
        f"measured {other.measured:,} B, "
        f"{other.predicted - other.measured:+,} B"
    )
    return Check(
        name=NAME, status="failed", predicted=other.predicted, measured=other.measured,
        detail=detail,
    )


def _levels(phase: PhaseMemory) -> Iterator[_Level]:
    if phase.name != "construction":  # which begins with a model that the user has made
        yield _Level(
            f"start of {phase.name}, rank {phase.rank}", phase.predicted.start_bytes,
            phase.measured.start_bytes,
        )
    yield _Level(
        f"end of {phase.name}, rank {phase.rank}", phase.predicted.end_bytes,
        phase.measured.end_bytes,
    )
