"""Memory at rest: what a rank holds when construction is over, and where its first and its steady
step begin and end.

Nothing is in flight there, on any backend, so that the level is compared to the byte. A buffer that
nobody frees stays within the bound of any peak; here it is seen, and a step that ends higher than
it began by more than was predicted is called a leak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.ir.run import MemoryRecord
from zsim.runs.compare.check import Check

NAME = "memory at rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of one rank on both sides."""

    rank: int
    name: str
    predicted: MemoryRecord
    found: MemoryRecord

    @property
    def where(self) -> str:
        """The rank and the phase in words."""
        return f"rank {self.rank}, {self.name}"

    @property
    def leak(self) -> int:
        """By how many bytes more the phase grows than was predicted."""
        growth = self.found.end_bytes - self.found.start_bytes
        return growth - (self.predicted.end_bytes - self.predicted.start_bytes)


@dataclass(frozen=True, slots=True)
class _Level:
    where: str
    predicted: int
    found: int


def compare_rest(phases: Sequence[Phase]) -> Check:
    """Every level at rest, none of which may differ; a steady step that leaves something behind is
    named first."""
    levels = [level for one in phases for level in _levels(one)]
    other = next((level for level in levels if level.predicted != level.found), None)
    if other is None:
        total = len(levels)
        held = levels[-1].found
        detail = (
            f"exact    {total} of {total} starts and ends of phases, {held:,} B from step to step"
        )
        return Check(
            name=NAME, status="ok", predicted=levels[-1].predicted, measured=held,
            relative_error=0.0, detail=detail,
        )
    alike = sum(level.predicted == level.found for level in levels)
    leaking = next((one for one in phases if one.name == "steady" and one.leak > 0), None)
    leak = (
        f"{leaking.where}: a leak, the step ends {leaking.leak:,} B higher than it began; "
        if leaking
        else ""
    )
    detail = (
        f"{leak}{alike} of {len(levels)} exact; {other.where}: predicted {other.predicted:,} B, "
        f"measured {other.found:,} B, "
        f"{other.predicted - other.found:+,} B"
    )
    return Check(
        name=NAME, status="failed", predicted=other.predicted, measured=other.found, detail=detail
    )


def _levels(one: Phase) -> Iterator[_Level]:
    if one.name != "construction":  # which begins with a model that the user has made
        yield _Level(
            f"start of {one.name}, rank {one.rank}", one.predicted.start_bytes,
            one.found.start_bytes,
        )
    yield _Level(
        f"end of {one.name}, rank {one.rank}", one.predicted.end_bytes, one.found.end_bytes
    )
