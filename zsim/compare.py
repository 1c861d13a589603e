"""Two Runs of one scenario, compared in order of rigour: collective order, bytes, memory, numerics, time.

A check that one side cannot make is `unsupported`, with the reason; no events at all is a failure, never a pass.
It reads Runs and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zsim.program import PHASES
from zsim.run import CollectiveRecord, PhaseRecord, RankRun, Run
from zsim.units import format_time

Status = Literal["ok", "failed", "unsupported"]
Number = int | float
CONTEXT = 3
MEMORY_BOUND = 0.05
TIME_BOUND = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `predicted` and `measured` are figures where it has some; `detail` says how it was compared."""

    name: str
    status: Status
    predicted: Number | None = None
    measured: Number | None = None
    relative_error: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What counts as agreement where it is not exact: shares of the measured figure, and of a parameter's magnitude."""

    memory: float = MEMORY_BOUND
    numerics: float = 1e-4
    time: float = TIME_BOUND


@dataclass(frozen=True, slots=True)
class _Pair:
    """One phase of one rank on both sides."""

    rank: int
    phase: str
    predicted: PhaseRecord
    measured: PhaseRecord


def compare(predicted: Run, measured: Run, *, bounds: Bounds | None = None) -> tuple[Check, ...]:
    """Every check, most rigorous first. Ranks are matched by number; a folded rank stands for those it says."""
    limits = bounds or Bounds()
    if predicted.world_size != measured.world_size:
        detail = f"{predicted.world_size} ranks predicted, {measured.world_size} measured"
        return (Check(name="world size", status="failed", detail=detail),)
    pairs = tuple(_pairs(predicted, measured))
    if not pairs:
        return (*_completeness(predicted, measured), Check(name="ranks", status="failed", detail="the two Runs have no rank in common"),)
    return (
        *_completeness(predicted, measured),
        _order(pairs, predicted.world_size),
        _bytes(pairs, predicted.world_size),
        *_memory(pairs, predicted, measured, limits.memory),
        _numerics(predicted, measured, limits.numerics),
        _time(predicted, measured, limits.time),
    )


def agrees(checks: tuple[Check, ...]) -> bool:
    """Whether no check failed and at least one was made."""
    statuses = {check.status for check in checks}
    return "failed" not in statuses and "ok" in statuses


def sees(run: Run, what: str) -> bool:
    """Whether the Run's backend says it sees `what` (memory, numerics, time); a Run that says nothing sees all."""
    return what in run.provenance.get("sees", what).split()


def _completeness(predicted: Run, measured: Run) -> Iterator[Check]:
    for word, run in (("predicted", predicted), ("measured", measured)):
        if not run.complete:
            why = f": {run.failure}" if run.failure else ""
            yield Check(name="complete", status="failed", detail=f"the {word} Run did not reach its end{why}")


def _pairs(predicted: Run, measured: Run) -> Iterator[_Pair]:
    for rank_run in measured.ranks:
        partner = _representative(predicted, rank_run.rank)
        if partner is None:
            continue
        for phase in PHASES:
            if phase in partner.phases and phase in rank_run.phases:
                yield _Pair(rank_run.rank, phase, partner.phases[phase], rank_run.phases[phase])


def _representative(run: Run, rank: int) -> RankRun | None:
    exact = next((item for item in run.ranks if item.rank == rank), None)
    if exact is None and len(run.ranks) == 1 and run.ranks[0].stands_for == run.world_size:
        return run.ranks[0]
    return exact


def _key(record: CollectiveRecord, world_size: int) -> tuple[str, str, int]:
    group = "world" if record.group_size == world_size else record.group.partition(":")[0]
    return (record.op, group, record.group_size)


def _nothing_seen(pairs: tuple[_Pair, ...], world_size: int) -> str:
    seen = any(pair.measured.collectives for pair in pairs)
    return "" if seen or world_size == 1 else "no collective was observed at all"


def _order(pairs: tuple[_Pair, ...], world_size: int) -> Check:
    predicted = sum(len(pair.predicted.collectives) for pair in pairs)
    measured = sum(len(pair.measured.collectives) for pair in pairs)
    first = _nothing_seen(pairs, world_size) or next(
        (text for pair in pairs if (text := _order_difference(pair, world_size))), ""
    )
    return Check(
        name="collective order",
        status="failed" if first else "ok",
        predicted=predicted,
        measured=measured,
        detail=first or f"exact    {measured} of {predicted}",
    )


def _order_difference(pair: _Pair, world_size: int) -> str:
    left = [_key(record, world_size) for record in pair.predicted.collectives]
    right = [_key(record, world_size) for record in pair.measured.collectives]
    if left == right:
        return ""
    length = min(len(left), len(right))
    return _context(pair, next((i for i in range(length) if left[i] != right[i]), length))


def _context(pair: _Pair, place: int) -> str:
    lines = [f"rank {pair.rank}, {pair.phase} phase, first difference at collective {place}:"]
    for i in range(max(0, place - CONTEXT), place + CONTEXT):
        left, right = _line(pair.predicted.collectives, i), _line(pair.measured.collectives, i)
        if left or right:
            lines.append(f"{'>' if i == place else ' '} {i:4} predicted {left or '-':44} measured {right or '-'}")
    return "\n".join(lines)


def _line(records: tuple[CollectiveRecord, ...], i: int) -> str:
    if i >= len(records):
        return ""
    record = records[i]
    return f"{record.op} {record.nbytes:,} B {record.group}({record.group_size})"


def _bytes(pairs: tuple[_Pair, ...], world_size: int) -> Check:
    left = sum(record.nbytes for pair in pairs for record in pair.predicted.collectives)
    right = sum(record.nbytes for pair in pairs for record in pair.measured.collectives)
    count = sum(len(pair.measured.collectives) for pair in pairs)
    first = _nothing_seen(pairs, world_size) or next((text for pair in pairs if (text := _bytes_difference(pair))), "")
    return Check(
        name="bytes",
        status="failed" if first else "ok",
        predicted=left,
        measured=right,
        relative_error=_relative(left, right),
        detail=first or f"exact    {count} of {count}, {right:,} B",
    )


def _bytes_difference(pair: _Pair) -> str:
    left = [record.nbytes for record in pair.predicted.collectives]
    right = [record.nbytes for record in pair.measured.collectives]
    if left == right:
        return ""
    length = min(len(left), len(right))
    return _context(pair, next((i for i in range(length) if left[i] != right[i]), length))


def _relative(predicted: Number, measured: Number) -> float:
    if predicted == measured:
        return 0.0
    return (predicted - measured) / measured if measured else math.inf


def _memory(pairs: tuple[_Pair, ...], predicted: Run, measured: Run, bound: float) -> Iterator[Check]:
    for phase in PHASES:
        found = [pair for pair in pairs if pair.phase == phase]
        if found:
            late = _late_free(found) if measured.backend == "gloo" else 0
            yield _phase_memory(f"peak memory, {phase}", found, _blind(predicted, measured, "memory"), bound, late)
    told = [pair for pair in pairs if pair.measured.memory.held]
    if told:
        yield _memory_by_kind(told)


def _memory_by_kind(pairs: list[_Pair]) -> Check:
    """What ranks hold from step to step, exactly, kind by kind."""
    for pair in pairs:
        for kind, nbytes in pair.measured.memory.held.items():
            wanted = pair.predicted.memory.held.get(kind, 0)
            if nbytes != wanted:
                where = f"rank {pair.rank}, {pair.phase}: {kind}: predicted {wanted:,} B, measured {nbytes:,} B"
                return Check(name="memory by kind", status="failed", predicted=wanted, measured=nbytes, detail=where)
    seen = pairs[-1].measured.memory.held
    kinds = ", ".join(f"{kind} {nbytes:,} B" for kind, nbytes in seen.items())
    total = sum(seen.values())
    return Check(name="memory by kind", status="ok", predicted=total, measured=total, detail=f"exact    {kinds}")


def _late_free(pairs: list[_Pair]) -> int:
    """gloo's worker thread may hold one tensor of a collective a moment after the caller has let go of it: at most the largest."""
    return max((one.nbytes for pair in pairs for one in pair.measured.collectives), default=0)


def _blind(predicted: Run, measured: Run, what: str) -> str:
    blind = [run.backend for run in (predicted, measured) if not sees(run, what)]
    return f"unsupported: {' and '.join(blind)} cannot see {what}" if blind else ""


def _phase_memory(name: str, pairs: list[_Pair], blind: str, bound: float, late: int) -> Check:
    if blind:
        return Check(name=name, status="unsupported", detail=blind)
    if any(pair.measured.memory.peak_bytes <= 0 for pair in pairs):
        return Check(name=name, status="failed", detail="no memory was observed at all")
    worst = max(pairs, key=lambda pair: (abs(_peak_error(pair)), -pair.rank))
    error = _peak_error(worst)
    left, right = worst.predicted.memory.peak_bytes, worst.measured.memory.peak_bytes
    if bound and right > left:
        bound = max(bound, late / right)
    return Check(
        name=name,
        status="ok" if abs(error) <= bound else "failed",
        predicted=left,
        measured=right,
        relative_error=error,
        detail=_memory_detail(worst, len({pair.rank for pair in pairs}), bound),
    )


def _peak_error(pair: _Pair) -> float:
    return _relative(pair.predicted.memory.peak_bytes, pair.measured.memory.peak_bytes)


def _memory_detail(pair: _Pair, num_ranks: int, bound: float) -> str:
    left, right = pair.predicted.memory, pair.measured.memory
    place = f" ({right.peak_at or left.peak_at})" if right.peak_at or left.peak_at else ""
    if left.peak_bytes == right.peak_bytes:
        ranks = f"on rank {pair.rank}" if num_ranks == 1 else f"on rank {pair.rank}, exact on all {num_ranks} observed"
        return f"exact    {right.peak_bytes:,} B {ranks}{place}"
    word = "within" if abs(_peak_error(pair)) <= bound else "beyond"
    difference = left.peak_bytes - right.peak_bytes
    return (
        f"{word} {bound:.0%}: predicted {left.peak_bytes:,} B, measured {right.peak_bytes:,} B on rank {pair.rank}, "
        f"{difference:+,} B, {_peak_error(pair):+.2%}{place}"
    )


def _numerics(predicted: Run, measured: Run, bound: float) -> Check:
    found = [
        (rank.numerics, run.backend)
        for run in (predicted, measured)
        for rank in run.ranks
        if rank.numerics is not None and sees(run, "numerics")
    ]
    if not found:
        blind = f"unsupported: {measured.backend} cannot see numerics"
        reason = blind if not sees(measured, "numerics") else "unsupported: no side compared itself with the reference"
        return Check(name="numerics", status="unsupported", detail=reason)
    differences = [numerics.largest_relative_difference for numerics, _ in found]
    finite = all(math.isfinite(value) for numerics, _ in found for value in (*numerics.losses, bound))
    worst = max(differences, key=lambda value: math.inf if math.isnan(value) else value)
    good = finite and worst <= bound
    steps = found[0][0].steps
    detail = f"parameters after {steps} steps: largest relative difference {worst:.1g}, at most {bound:g} allowed"
    return Check(name="numerics", status="ok" if good else "failed", measured=worst, detail=detail)


def _time(predicted: Run, measured: Run, bound: float) -> Check:
    blind = _blind(predicted, measured, "time")
    left, right = predicted.step_time_ns, measured.step_time_ns
    if blind or left is None or right is None:
        return Check(name="step time", status="unsupported", detail=blind or "unsupported: one side has no step time")
    assumed = [run for run in (predicted, measured) if run.provenance.get("calibration", "measured") == "assumed"]
    if assumed:
        cluster = assumed[0].provenance.get("cluster", "this hardware")
        detail = f"unsupported: {cluster} is not calibrated here (its constants are assumed)"
        return Check(name="step time", status="unsupported", predicted=left, measured=right, detail=detail)
    error = _relative(left, right)
    good = abs(error) <= bound
    detail = f"predicted {format_time(left)}, measured {format_time(right)}, {error:+.1%}, at most {bound:.0%} allowed"
    return Check(
        name="step time",
        status="ok" if good else "failed",
        predicted=left,
        measured=right,
        relative_error=error,
        detail=detail,
    )
