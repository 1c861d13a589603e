"""Start and peak of each part of a step (forward, backward, optimizer, zero_grad), predicted
against measured.

They agree to the byte where the measured Run's memory follows the host, and elsewhere within a
share of the step's peak. A worker thread of gloo may free a buffer in a later part than the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.ir.run import MemoryRecord, PartRecord
from zsim.runs.compare.check import Check, unsupported

NAME = "memory of parts"
EXACT = "exact"
"""Value of `memory` in the provenance of a Run that frees every buffer in the host's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Memory of a step of a rank, predicted and measured."""

    rank: int
    phase: str
    predicted: MemoryRecord
    measured: MemoryRecord

    @property
    def where(self) -> str:
        """The rank and the step, as text."""
        return f"rank {self.rank}, {self.phase}"


@dataclass(frozen=True, slots=True)
class _StartOrPeak:
    """A start or a peak, predicted and measured, in bytes, and the measured peak of the step."""

    where: str
    predicted: int
    measured: int
    step_peak: int

    @property
    def error(self) -> float:
        if self.predicted == self.measured:
            return 0.0
        return (self.predicted - self.measured) / self.step_peak if self.step_peak else math.inf


def compare_parts(steps: Sequence[StepMemory], *, exact: bool, bound: float) -> Check:
    """The check of every start and peak.

    They agree to the byte where `exact`, else within the share `bound` of the step's measured peak.
    """
    for side, records in (
        ("measured", [step.measured for step in steps]),
        ("predicted", [step.predicted for step in steps]),
    ):
        if not any(record.parts for record in records):
            return unsupported(NAME, f"the {side} Run does not tell the parts of its steps")
    other = next((step for step in steps if _names(step.predicted) != _names(step.measured)), None)
    if other is not None:
        left, right = " ".join(_names(other.predicted)), " ".join(_names(other.measured))
        return Check(name=NAME, status="failed", detail=f"{other.where}: parts {left or 'none'} "
                                                        f"predicted, {right or 'none'} measured")
    figures = list(_figures(steps))
    worst = max(figures, key=lambda figure: abs(figure.error))
    return Check(
        name=NAME,
        status="ok" if worst.error == 0 or (not exact and abs(worst.error) <= bound) else "failed",
        predicted=worst.predicted,
        measured=worst.measured,
        relative_error=worst.error,
        detail=_detail(figures, worst, exact=exact, bound=bound),
    )


def _names(record: MemoryRecord) -> list[str]:
    return [_name(part) for part in record.parts]


def _name(part: PartRecord) -> str:
    return f"{part.name} {part.micro_batch}" if part.name in ("forward", "backward") else part.name


def _figures(steps: Sequence[StepMemory]) -> Iterator[_StartOrPeak]:
    for step in steps:
        for left, right in zip(step.predicted.parts, step.measured.parts, strict=True):
            peak = step.measured.peak_bytes
            yield _StartOrPeak(
                f"start of {_name(left)}, {step.where}", left.start_bytes, right.start_bytes, peak
            )
            yield _StartOrPeak(
                f"peak of {_name(left)}, {step.where}", left.peak_bytes, right.peak_bytes, peak
            )


def _detail(figures: list[_StartOrPeak], worst: _StartOrPeak, *, exact: bool, bound: float) -> str:
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
    difference = worst.predicted - worst.measured
    return (
        f"{word}: {alike} of {len(figures)} exact; {worst.where}: predicted {worst.predicted:,} "
        f"B, measured {worst.measured:,} B, "
        f"{difference:+,} B, {worst.error:+.2%}"
    )
