"""Checks of what makes a step's time: exposed communication, and each unit's share.

They are judged where the step time is. Errors of units are independent, so that those of a part are
larger than that of the whole. A share s may be off by the band's half-width times the root of s.
Shares are means over ranks, since on one rank a collective also waits for those that are late. The
checks read Runs and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from statistics import fmean

from zsim.io.units import format_time
from zsim.ir.run import RankRun, RunRecord, band_of
from zsim.runs.compare.check import Check, unsupported
from zsim.runs.compare.step_time import BUSY, assumed_reason, reason_of
from zsim.runs.figures.metrics import exposed_ns
from zsim.runs.figures.unit_times import time_by_unit

EXPOSED, BY_UNIT = "exposed communication", "time by unit"
DISTURBED = 0.25
"""Share by which the recorded step may be longer than the timed ones and still tell of them."""

Pairs = Sequence[tuple[RankRun, RankRun]]


def compare_timelines(
    predicted: RunRecord, measured: RunRecord, pairs: Pairs, *, step_time: Check
) -> Iterator[Check]:
    """The two checks of `pairs` of ranks; `step_time` is the check that says whether times are
    judged."""
    if reason := _unjudged(predicted, measured, pairs, step_time):
        for name in (EXPOSED, BY_UNIT):
            yield unsupported(name, reason)
        return
    low, high = band_of(predicted) or (1.0, 1.0)
    width = max(1 - low, high - 1)
    steps = _step_ns(predicted, pairs[0][0]), _step_ns(measured, pairs[0][1])
    sides = ((predicted, [left for left, _ in pairs]), (measured, [right for _, right in pairs]))
    left, right = (
        fmean(exposed_ns(rank) / _step_ns(run, rank) for rank in ranks) for run, ranks in sides
    )
    yield _check(EXPOSED, "", left, right, steps, width)
    mine, theirs = (_shares(run, ranks) for run, ranks in sides)
    units = sorted({*mine, *theirs})
    if unnamed := sorted(set(theirs) - set(mine)):
        yield unsupported(
            BY_UNIT, f"the measured spans are of other units, as {unnamed[0][:40]}"
        )
        return
    furthest = max(units, key=lambda unit: _excess(mine, theirs, unit, width))
    about = f"{len(units)} units, {furthest} furthest: "
    yield _check(
        BY_UNIT, about, mine.get(furthest, 0.0), theirs.get(furthest, 0.0), steps, width
    )


def _unjudged(
    predicted: RunRecord, measured: RunRecord, pairs: Pairs, step_time: Check
) -> str:
    """The reason that nothing is judged, or ""."""
    if step_time.status == "unsupported":
        return reason_of(step_time)
    if reason := assumed_reason(predicted, measured):
        return reason
    for word, run, ranks in (
        ("predicted", predicted, [left for left, _ in pairs]),
        ("measured", measured, [right for _, right in pairs]),
    ):
        if not ranks or not all(rank.spans for rank in ranks):
            return f"the {word} Run, of {run.backend}, has no spans"
    if band_of(predicted) is None:
        return f"the predicted Run, of {predicted.backend}, has no band"
    if any((rank.others_share or 0.0) > BUSY for rank in measured.ranks):
        return "other work ran beside the recorded step"
    recorded = max(_step_ns(measured, rank) for _, rank in pairs)
    if recorded > (1 + DISTURBED) * (measured.step_time_ns or recorded):
        return (
            f"the recorded step took {format_time(recorded)}, the timed ones "
            f"{format_time(measured.step_time_ns or 0)}"
        )
    return ""


def _step_ns(run: RunRecord, rank: RankRun) -> int:
    """The step that the rank's spans are of."""
    return max(1, rank.recorded_step_ns or run.step_time_ns or 1)


def _shares(run: RunRecord, ranks: Sequence[RankRun]) -> dict[str, float]:
    """Each unit's share of the step, as a mean over ranks."""
    totals: dict[str, float] = defaultdict(float)
    for rank in ranks:
        step_ns = _step_ns(run, rank)
        for unit, ns in time_by_unit(rank, step_ns).items():
            totals[unit] += ns / step_ns / len(ranks)
    return dict(totals)


def _allowed(left: float, right: float, width: float) -> float:
    return width * sqrt(max(left, right))


def _excess(
    mine: Mapping[str, float], theirs: Mapping[str, float], unit: str, width: float
) -> float:
    left, right = mine.get(unit, 0.0), theirs.get(unit, 0.0)
    return abs(left - right) - _allowed(left, right, width)


def _check(
    name: str, about: str, left: float, right: float, steps: tuple[int, int], width: float
) -> Check:
    allowed = _allowed(left, right, width)
    good = abs(left - right) <= allowed
    return Check(
        name=name, status="ok" if good else "failed", predicted=round(left * steps[0]),
        measured=round(right * steps[1]),
        relative_error=(left - right) / right if right else None,
        detail=f"{'within' if good else 'beyond'} the band: {about}predicted {left:.1%} of the "
               f"step, measured {right:.1%}, at most {allowed:.1%} apart allowed",
    )
