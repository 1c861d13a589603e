"""A Run as a trace in the Chrome format, which Perfetto opens.

A rank is a process, with a thread for each stream and each ring that it sends on, and with counters
of memory.

Format: Trace Event Format, Google 2016 (complete events "X", counters "C", flows "s" and "f",
metadata "M"). Its times are microseconds; the fraction keeps the nanoseconds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from zsim.io import files
from zsim.ir.ops import COLLECTIVES, STREAMS
from zsim.ir.run import HopRecord, RankRun, RunRecord, Span

Event = dict[str, Any]
FIRST_HOP = len(STREAMS) + 1
"""The first thread of hops; streams have those before."""


def trace(run: RunRecord) -> dict[str, Any]:
    """The trace of the steady step as one JSON object."""
    events = list(_events(run))
    about = {"scenario": run.scenario, "backend": run.backend, **run.provenance}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def overlay(predicted: RunRecord, measured: RunRecord) -> dict[str, Any]:
    """The trace of both Runs: each rank's predicted process, and its measured one below."""
    events = list(_events(predicted, side="predicted"))
    first = 1 + max((event["id"] for event in events if "id" in event), default=0)
    events += _events(measured, side="measured", offset=predicted.world_size, first=first)
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
    run: RunRecord, *, side: str = "", offset: int = 0, first: int = 1
) -> Iterator[Event]:
    """The events of a Run, whose processes are its ranks plus `offset`; flows count from `first`.
    """
    for rank in run.ranks:
        for event in (*_names(rank, side), *map(_complete, repeat(rank.rank), rank.spans),
                      *_counters(rank)):
            if event["name"] == "process_sort_index" and side:
                event["args"]["sort_index"] = 2 * rank.rank + (offset > 0)
            yield event | {"pid": event["pid"] + offset}
    for event in _hops(run):
        yield event | {"pid": event["pid"] + offset}
    for event in _flows(run):
        yield event | {"pid": event["pid"] + offset, "id": event["id"] + first - 1}


def require(path: Path) -> None:
    """PlaceError for a name that Perfetto and Chrome do not take for a trace."""
    if not path.name.endswith((".json", ".json.gz")):
        raise files.PlaceError(
            where=str(path), expected="a file that ends in .json or .json.gz",
            found=path.suffix or "no ending", remedy=f"name it {path.stem}.json.gz",
        )


def write(run: RunRecord, path: Path, *, measured: RunRecord | None = None) -> None:
    """Write the trace of `run`, over it that of `measured`, compressed when the name ends in .gz.

    Equal Runs give equal bytes.
    """
    table = trace(run) if measured is None else overlay(run, measured)
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
    for stream in dict.fromkeys(span.stream for span in rank.spans):
        where = {"pid": rank.rank, "tid": _thread(stream)}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": stream}}


def _complete(rank: int, span: Span) -> Event:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": rank,
        "tid": _thread(span.stream),
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {"unit": span.unit} | ({"bytes": span.nbytes} if span.kind in COLLECTIVES else {}),
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


def _flows(run: RunRecord) -> Iterator[Event]:
    """Arrows of each collective, from the rank of its group that began first to each other rank."""
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
    pairs = (
        (min(met, key=lambda member: member[:2]), other)
        for met in meetings.values()
        for other in met
    )
    arrows = ((source, target) for source, target in pairs if source is not target)
    for identity, ((_, source, first), (_, other, span)) in enumerate(arrows, 1):
        common = {"name": first.name, "cat": "collective", "id": identity}
        yield {
            **common, "ph": "s", "pid": source, "tid": _thread(first.stream),
            "ts": first.start_ns / 1000,
        }
        yield {
            **common, "ph": "f", "bp": "e", "pid": other, "tid": _thread(span.stream),
            "ts": span.start_ns / 1000,
        }
