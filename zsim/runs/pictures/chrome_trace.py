"""A Run as a trace in the Chrome format, which Perfetto opens.

A rank is a process, with counters of memory. It has a thread for the parts of the step, for each
stream and for each ring that it sends on. Notes of a simulation add the reasons of waits, memory by
kind and rates of links.

Format: Trace Event Format, Google 2016 (complete events "X", instants "i", counters "C", flows "s"
and "f", metadata "M"). Its times are microseconds; the fraction keeps the nanoseconds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from zsim.io import files
from zsim.ir.ops import COLLECTIVES, STREAMS
from zsim.ir.run import HopRecord, RankRun, RunRecord, Span
from zsim.runs.pictures.trace_notes import RankNotes, SpanNote, TraceNotes

Event = dict[str, Any]
FIRST_HOP = len(STREAMS) + 1
"""The first thread of hops; streams have those before."""
PARTS = 1_000_000
"""The thread of the step's parts, above all streams."""
PART_OF = {
    "forward": "forward", "backward": "backward", "recompute": "backward", "optimizer": "optimizer"
}
"""Part of the step by kind of op."""
MOMENTS = ("alloc", "free")
"""Kinds of ops that take no time: instants."""
NO_NOTES = RankNotes()


def trace(run: RunRecord, notes: TraceNotes | None = None) -> dict[str, Any]:
    """The trace of the steady step as one JSON object, with `notes` on its spans by rank."""
    events = list(_events(run, notes or {}))
    about = {"scenario": run.scenario, "backend": run.backend, **run.provenance}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def overlay(predicted: RunRecord, measured: RunRecord) -> dict[str, Any]:
    """The trace of both Runs: each rank's predicted process, and its measured one below."""
    events = list(_events(predicted, {}, side="predicted"))
    first = 1 + max((event["id"] for event in events if "id" in event), default=0)
    events += _events(measured, {}, side="measured", offset=predicted.world_size, first=first)
    about = {
        "scenario": measured.scenario,
        **{
            f"{side} {key}": text
            for side, run in (("predicted", predicted), ("measured", measured))
            for key, text in {"backend": run.backend, **run.provenance}.items()
        },
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _events(
    run: RunRecord, notes: TraceNotes, *, side: str = "", offset: int = 0, first: int = 1
) -> Iterator[Event]:
    """The events of a Run, whose processes are its ranks plus `offset`; flows count from `first`.
    """
    for rank in run.ranks:
        own = notes.get(rank.rank, NO_NOTES)
        for event in (*_names(rank, side), *_parts(rank), *_spans(rank, own), *_counters(rank),
                      *_noted_counters(rank.rank, own)):
            if event["name"] == "process_sort_index" and side:
                event["args"]["sort_index"] = 2 * rank.rank + (offset > 0)
            yield event | {"pid": event["pid"] + offset}
    for event in _hops(run):
        yield event | {"pid": event["pid"] + offset}
    causes = (pair for rank in run.ranks for pair in _causes(rank, notes.get(rank.rank, NO_NOTES)))
    for identity, (start, end) in enumerate((*causes, *_late(run)), first):
        for event in (start, end):
            yield event | {"pid": event["pid"] + offset, "id": identity}


def require(path: Path) -> None:
    """PlaceError for a name that Perfetto and Chrome do not take for a trace."""
    if not path.name.endswith((".json", ".json.gz")):
        raise files.PlaceError(
            where=str(path), expected="a file that ends in .json or .json.gz",
            found=path.suffix or "no ending", remedy=f"name it {path.stem}.json.gz",
        )


def write(
    run: RunRecord, path: Path, *, measured: RunRecord | None = None,
    notes: TraceNotes | None = None,
) -> None:
    """Write the trace of `run`, over it that of `measured`, compressed when the name ends in .gz.

    Equal Runs and `notes` give equal bytes.
    """
    table = trace(run, notes) if measured is None else overlay(run, measured)
    data = json.dumps(table, separators=(",", ":")).encode()
    files.write(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _thread(stream: str) -> int:
    return STREAMS.index(stream) if stream in STREAMS else len(STREAMS)


def _names(rank: RankRun, side: str) -> Iterator[Event]:
    folded = f" and {rank.stands_for - 1} like it" if rank.stands_for > 1 else ""
    side = f"{side} " if side else ""
    yield {
        "ph": "M", "name": "process_name", "pid": rank.rank,
        "args": {"name": f"{side}rank {rank.rank}{folded}"},
    }
    yield {
        "ph": "M", "name": "process_sort_index", "pid": rank.rank,
        "args": {"sort_index": rank.rank},
    }
    if any(span.kind in PART_OF for span in rank.spans):
        where = {"pid": rank.rank, "tid": PARTS}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": "step"}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": -1}}
    for stream in dict.fromkeys(span.stream for span in rank.spans):
        where = {"pid": rank.rank, "tid": _thread(stream)}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": stream}}


def _parts(rank: RankRun) -> Iterator[Event]:
    """The step's parts as compute goes through them: forward, backward, optimizer."""
    busy = [span for span in rank.spans if span.kind in PART_OF and span.end_ns > span.start_ns]
    busy.sort(key=lambda span: (span.start_ns, span.end_ns))
    for name, spans in groupby(busy, key=lambda span: PART_OF[span.kind]):
        first, *rest = spans
        end = max([first.end_ns, *(span.end_ns for span in rest)])
        yield {
            "ph": "X", "name": name, "cat": "part", "pid": rank.rank, "tid": PARTS,
            "ts": first.start_ns / 1000, "dur": (end - first.start_ns) / 1000, "args": {},
        }


def _spans(rank: RankRun, notes: RankNotes) -> Iterator[Event]:
    """A slice for each op; an instant for allocations and frees that are ops of their own."""
    for number, span in enumerate(rank.spans):
        where = {
            "name": span.name, "cat": span.kind, "pid": rank.rank, "tid": _thread(span.stream),
            "ts": span.start_ns / 1000,
        }
        if span.kind in MOMENTS and span.end_ns == span.start_ns:
            yield {"ph": "i", "s": "t", **where, "args": {"unit": span.unit}}
            continue
        noted = notes.spans.get(number, SpanNote()).arguments
        size = {"bytes": span.nbytes} if span.kind in COLLECTIVES else {}
        yield {
            "ph": "X", **where, "dur": (span.end_ns - span.start_ns) / 1000,
            "args": {"unit": span.unit, **size, **noted},
        }
        yield from _kernels(span, rank.rank, notes.kernels.get(number, ()))


def _kernels(
    span: Span, rank: int, kernels: Sequence[tuple[str, int]]
) -> Iterator[Event]:
    """Slices inside that of `span`: each kernel has the share of it that it takes alone."""
    total, before = sum(ns for _, ns in kernels), 0
    for name, ns in kernels:
        start, end = (
            span.start_ns + (span.end_ns - span.start_ns) * part // total
            for part in (before, before + ns)
        )
        before += ns
        yield {
            "ph": "X", "name": name, "cat": "kernel", "pid": rank, "tid": _thread(span.stream),
            "ts": start / 1000, "dur": (end - start) / 1000, "args": {"alone_ns": ns},
        }


def _hops(run: RunRecord) -> Iterator[Event]:
    """The chunks that each shown rank sends round a ring, in a thread for each group, and that
    thread's name."""
    shown = {rank.rank for rank in run.ranks}
    threads: dict[tuple[int, str], int] = {}
    for hop in run.hops:
        if hop.source not in shown:
            continue
        key = hop.source, hop.group
        if key not in threads:
            threads[key] = FIRST_HOP + sum(source == hop.source for source, _ in threads)
            name = f"{hop.group} ring, to rank {hop.destination} by {hop.link}"
            where = {"pid": hop.source, "tid": threads[key]}
            yield {"ph": "M", "name": "thread_name", **where, "args": {"name": name}}
        yield _chunk(hop, threads[key])


def _chunk(hop: HopRecord, thread: int) -> Event:
    return {
        "ph": "X",
        "name": f"{hop.name} step {hop.step}",
        "cat": "hop",
        "pid": hop.source,
        "tid": thread,
        "ts": hop.start_ns / 1000,
        "dur": (hop.end_ns - hop.start_ns) / 1000,
        "args": {"to": hop.destination, "lost_ns": hop.lost_ns},
    }


def _counters(rank: RankRun) -> Iterator[Event]:
    """Allocated bytes when the step begins and after each op, at the moment when the host issued
    it."""
    steady = rank.phases.get("steady")
    if steady is None or len(steady.memory.timeline) != len(rank.spans):
        return
    points = [(0, steady.memory.start_bytes)]
    points += [
        (span.issued_ns, after)
        for span, (_, after) in zip(rank.spans, steady.memory.timeline, strict=True)
    ]
    for moment, nbytes in points:
        yield {
            "ph": "C", "name": "allocated", "pid": rank.rank, "ts": moment / 1000,
            "args": {"bytes": nbytes},
        }


def _noted_counters(rank: int, notes: RankNotes) -> Iterator[Event]:
    """Allocated bytes by kind, and bytes/s on each of the rank's links."""
    kinds = dict.fromkeys(kind for _, by_kind in notes.memory for kind in by_kind)
    for moment, by_kind in notes.memory:
        yield {
            "ph": "C", "name": "memory by kind", "pid": rank, "ts": moment / 1000,
            "args": {kind: by_kind.get(kind, 0) for kind in kinds},
        }
    for link, points in notes.rates.items():
        for moment, rate in points:
            yield {
                "ph": "C", "name": f"{link}, bytes/s", "pid": rank, "ts": moment / 1000,
                "args": {"sent": rate},
            }


def _causes(rank: RankRun, notes: RankNotes) -> Iterator[tuple[Event, Event]]:
    """An arrow to each span from the end of the one that it waited for."""
    for number, note in notes.spans.items():
        if note.cause is not None:
            cause, span = rank.spans[note.cause], rank.spans[number]
            common = {"name": note.reason, "cat": "waits", "pid": rank.rank}
            at = max(cause.start_ns, cause.end_ns - 1)  # inside the slice that it leaves
            yield (
                {**common, "ph": "s", "tid": _thread(cause.stream), "ts": at / 1000},
                {**common, "ph": "f", "bp": "e", "tid": _thread(span.stream),
                 "ts": span.start_ns / 1000},
            )


def _late(run: RunRecord) -> Iterator[tuple[Event, Event]]:
    """Arrows of each collective from the rank that begins last to those that began before it."""
    meetings: dict[tuple[str, tuple[int, ...], int], list[tuple[int, int, Span]]] = defaultdict(
        list
    )
    for rank in run.ranks:
        count: dict[str, int] = defaultdict(int)
        for span in rank.spans:
            if span.kind in COLLECTIVES:
                key = (span.group, run.mesh.group(span.group, rank.rank), count[span.group])
                meetings[key].append((span.start_ns, rank.rank, span))
                count[span.group] += 1
    for met in meetings.values():
        moment, late, last = max(met, key=lambda member: (member[0], -member[1]))
        common = {"name": "another rank", "cat": "waits", "ts": moment / 1000}
        for start, early, span in met:
            if start < moment < span.end_ns:
                yield (
                    {**common, "ph": "s", "pid": late, "tid": _thread(last.stream)},
                    {**common, "ph": "f", "bp": "e", "pid": early, "tid": _thread(span.stream)},
                )
