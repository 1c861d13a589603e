"""Timeline of a step for the page: spans by rank and stream, exposed communication, critical path.

Ranks that are alike are one, as the simulator folds them. Short neighbours become one span where a
page would be too large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from zsim.analysis.causes.exposure import exposed_intervals, idle_intervals, shares_of
from zsim.analysis.causes.why import CriticalOp, Why
from zsim.engine.timeline import Times
from zsim.io.units import counted
from zsim.ir.ops import STREAMS, Op, OpKind, Stream
from zsim.ir.run import RankRun, Span
from zsim.report.sides import ReportSide

Table = dict[str, Any]
MOST_RANKS = 64
"""Ranks of a side that the page has; the first of more."""
MOST_SPANS = 40_000
"""Spans of all sides together, at about 30 bytes each."""
FINEST = 1 << 14
"""Part of the step below which neighbours are merged first; doubled until they are few enough."""
START, END, WHAT, EXPOSED, REASON, CRITICAL, COUNT = range(7)
"""Places in a row: ns, ns, index of what runs, exposed ns, index of why, 1 on the path, merged
spans."""


class Words:
    """Texts and tuples by number, in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, word: Any) -> int:
        """The number of `word`."""
        return self.numbers.setdefault(word, len(self.numbers))

    def table(self) -> list[Any]:
        """All of them, by number."""
        return list(self.numbers)


def timelines(sides: Sequence[ReportSide]) -> Table:
    """The timelines of all sides on one axis."""
    labels, reasons = Words(), Words()
    reasons.number("")
    ranks = [
        _rank(number, side, rank, labels, reasons)
        for number, side in enumerate(sides)
        for rank in side.record.ranks[:MOST_RANKS]
        if rank.spans
    ]
    longest = max((_end(rank) for rank in ranks), default=0)
    part, width = FINEST, 0
    while part > 1 and sum(len(t["spans"]) for r in ranks for t in r["tracks"]) > MOST_SPANS:
        width, part = -(-longest // part), part // 2
        for rank in ranks:
            for track in rank["tracks"]:
                track["spans"] = merged(track["spans"], width)
    left = sum(max(0, len(side.record.ranks) - MOST_RANKS) for side in sides)
    return {
        "ranks": ranks, "what": labels.table(), "reasons": reasons.table(), "end_ns": longest,
        "merged_below_ns": width, "ranks_left_out": left,
    }


def merged(rows: list[list[int]], width: int) -> list[list[int]]:
    """Rows of a track in which neighbours shorter than `width` and no farther apart are one.

    Only what is equally critical merges. The exposed nanoseconds add up, and the first names it.
    """
    kept: list[list[int]] = []
    for row in rows:
        last = kept[-1] if kept else None
        if (
            last is not None and last[CRITICAL] == row[CRITICAL]
            and row[END] - row[START] < width and row[START] - last[END] < width
            and last[END] - last[START] < width
        ):
            last[END] = max(last[END], row[END])
            last[EXPOSED] += row[EXPOSED]
            last[REASON] = last[REASON] or row[REASON]
            last[COUNT] += row[COUNT]
        else:
            kept.append(list(row))
    return kept


def _end(rank: Table) -> int:
    return max((row[END] for track in rank["tracks"] for row in track["spans"]), default=0)


def _rank(number: int, side: ReportSide, rank: RankRun, labels: Words, reasons: Words) -> Table:
    ops, times = ops_of(rank.spans), _times(rank.spans)
    why = side.step.why(rank.rank) if side.step else None
    exposed = _exposed(ops, times, why)
    path = why.critical_path if why else ()
    critical = {link.op.index for link in path}
    rows: dict[str, list[list[int]]] = {}
    for index, span in enumerate(rank.spans):
        if span.end_ns > span.start_ns:
            ns, reason = exposed.get(index, (0, ""))
            key = (span.kind, span.unit, span.nbytes if span.group else 0, span.group)
            rows.setdefault(span.stream, []).append([
                span.start_ns, span.end_ns, labels.number(key), ns, reasons.number(reason),
                int(index in critical), 1,
            ])
    streams = sorted(rows, key=lambda name: _order(name, COMPUTE_FIRST))
    places = {stream: number for number, stream in enumerate(streams)}
    alike = f" and {counted(rank.stands_for - 1, 'rank')} like it" if rank.stands_for > 1 else ""
    return {
        "side": number, "label": f"rank {rank.rank}{alike}",
        "tracks": [{"stream": name, "spans": sorted(rows[name])} for name in streams],
        "exposed": [list(interval) for interval in exposed_intervals(ops, times)],
        "path": list(_path(path, places)),
    }


COMPUTE_FIRST = ("compute", *(stream for stream in STREAMS if stream != "compute"))


def _order(name: str, known: Sequence[str]) -> tuple[int, str]:
    return (known.index(name) if name in known else len(known)), name


def ops_of(spans: Sequence[Span]) -> tuple[Op, ...]:
    """Ops with the kinds, streams and groups of `spans`; a record has neither waits nor kernels."""
    return tuple(
        Op(
            index, cast(OpKind, span.kind), span.unit, cast(Stream, span.stream), group=span.group,
            nbytes=span.nbytes,
        )
        for index, span in enumerate(spans)
    )


def _times(spans: Sequence[Span]) -> Times:
    return Times(
        starts=[span.start_ns for span in spans], ends=[span.end_ns for span in spans],
        issued=[span.issued_ns for span in spans],
    )


def _exposed(ops: Sequence[Op], times: Times, why: Why | None) -> Mapping[int, tuple[int, str]]:
    """Exposed nanoseconds of each collective by op, and why where that is known."""
    if why is None:
        idle = list(idle_intervals(ops, times))
        return {op.index: (ns, "") for op, ns in shares_of(ops, times, idle) if ns}
    return {
        each.op.index: (
            each.exposed_ns,
            each.reason + (f", after {each.waited_for}" if each.waited_for else ""),
        )
        for each in why.exposed
    }


def _path(path: Iterable[CriticalOp], places: Mapping[str, int]) -> Iterable[list[int]]:
    """Track, start and end of each op on the critical path; neighbours on a track are one."""
    last: list[int] | None = None
    for link in path:
        track = places.get(link.op.stream)
        if track is None or link.end_ns == link.start_ns:
            continue
        if last is not None and last[0] == track and last[2] == link.start_ns:
            last[2] = link.end_ns
            continue
        if last is not None:
            yield last
        last = [track, link.start_ns, link.end_ns]
    if last is not None:
        yield last
