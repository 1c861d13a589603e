"""Start and peak of each part of a step (forward, backward, optimizer, zero_grad), predicted
against measured.

They are held to the byte where the measured Run says that its memory follows the host, and
elsewhere within a share of the step's peak: a worker thread of gloo may let go of a buffer after
the part in which the host did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.ir.run import MemoryRecord, PartRecord
from zsim.runs.compare.check import Check

NAME = "memory of parts"
EXACT = "exact"
"""What a Run's provenance says of its `memory` where every free is in the host's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step of one rank on both sides."""

    rank: int
    phase: str
    predicted: MemoryRecord
    found: MemoryRecord

    @property
    def where(self) -> str:
        """The rank and the step in words."""
        return f"rank {self.rank}, {self.phase}"


@dataclass(frozen=True, slots=True)
class _Figure:
    """A start or a peak on both sides, and the peak of the whole step as it was measured."""

    where: str
    predicted: int
    found: int
    step_peak: int

    @property
    def error(self) -> float:
        if self.predicted == self.found:
            return 0.0
        return (self.predicted - self.found) / self.step_peak if self.step_peak else math.inf


def compare_parts(steps: Sequence[Measured], *, exact: bool, bound: float) -> Check:
    """Every start and every peak; `exact`: none may differ, else none by more than `bound` of the
    measured peak of the step."""
    for side, records in (
        ("measured", [one.found for one in steps]), ("predicted", [one.predicted for one in steps])
    ):
        if not any(record.parts for record in records):
            return Check(name=NAME, status="unsupported", detail=f"unsupported: the {side} Run "
                                                                 f"does not tell the parts of its "
                                                                 f"steps")
    other = next((one for one in steps if _names(one.predicted) != _names(one.found)), None)
    if other is not None:
        left, right = " ".join(_names(other.predicted)), " ".join(_names(other.found))
        return Check(name=NAME, status="failed", detail=f"{other.where}: parts {left or 'none'} "
                                                        f"predicted, {right or 'none'} measured")
    figures = list(_figures(steps))
    worst = max(figures, key=lambda figure: abs(figure.error))
    return Check(
        name=NAME,
        status="ok" if worst.error == 0 or (not exact and abs(worst.error) <= bound) else "failed",
        predicted=worst.predicted,
        measured=worst.found,
        relative_error=worst.error,
        detail=_detail(figures, worst, exact=exact, bound=bound),
    )


def _names(record: MemoryRecord) -> list[str]:
    return [_name(part) for part in record.parts]


def _name(part: PartRecord) -> str:
    return f"{part.name} {part.micro_batch}" if part.name in ("forward", "backward") else part.name


def _figures(steps: Sequence[Measured]) -> Iterator[_Figure]:
    for one in steps:
        for left, right in zip(one.predicted.parts, one.found.parts, strict=True):
            peak = one.found.peak_bytes
            yield _Figure(
                f"start of {_name(left)}, {one.where}", left.start_bytes, right.start_bytes, peak
            )
            yield _Figure(
                f"peak of {_name(left)}, {one.where}", left.peak_bytes, right.peak_bytes, peak
            )


def _detail(figures: list[_Figure], worst: _Figure, *, exact: bool, bound: float) -> str:
    alike = sum(figure.error == 0 for figure in figures)
    if alike == len(figures):
        return (
            f"exact    {alike} of {alike} starts and peaks of forward, backward, optimizer and "
            f"zero_grad"
        )
    word = (
        "differs"
        if exact
        else f"{'within' if abs(worst.error) <= bound else 'beyond'} {bound:.0%} of the step's peak"
    )
    difference = worst.predicted - worst.found
    return (
        f"{word}: {alike} of {len(figures)} exact; {worst.where}: predicted {worst.predicted:,} "
        f"B, measured {worst.found:,} B, "
        f"{difference:+,} B, {worst.error:+.2%}"
    )
