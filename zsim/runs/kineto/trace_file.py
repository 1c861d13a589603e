"""Traces of torch's profiler as files: Chrome's JSON, compressed or not, of one rank each.

They come from anywhere: sizes have limits, and a trace that is not what torch.profiler exports is
refused by its first defect. What the events mean is not known here.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from zsim.errors import ZsimError, shown
from zsim.io.files import obstacle
from zsim.io.json_reader import TwiceError, loads

MAX_BYTES = 1024**3
"""Bytes of a trace's JSON at most, uncompressed: some ten steps of a large model."""
MAX_EVENTS = 4_000_000
EXPORT = "profile one or two steps and write them by export_chrome_trace"


class KinetoError(ZsimError):
    """A file that is no trace of torch's profiler, or lacks what a Run needs."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One complete event; times are ns."""

    name: str
    category: str
    thread: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTrace:
    """The trace of one rank. `groups` has the ranks of each process group by its name."""

    path: Path
    rank: int
    world_size: int
    groups: Mapping[str, tuple[int, ...]]
    device: str
    events: tuple[TraceEvent, ...]

    def of(self, *categories: str) -> list[TraceEvent]:
        """Events of `categories`, by start time."""
        return [event for event in self.events if event.category in categories]


def read(path: Path) -> KinetoTrace:
    """The trace in a file; KinetoError for anything else."""
    table = _table(path)
    rows = table.get("traceEvents") if isinstance(table, dict) else None
    if not isinstance(rows, list):
        raise _unfit(path, "a trace with traceEvents", "other JSON")
    if len(rows) > MAX_EVENTS:
        raise _unfit(path, f"at most {MAX_EVENTS:,} events", f"{len(rows):,}")
    events = [
        _event(path, number, row)
        for number, row in enumerate(rows)
        if isinstance(row, dict) and row.get("ph") == "X"
    ]
    devices = table.get("deviceProperties") or [{}]
    name = devices[0].get("name") if isinstance(devices, list) and _is_table(devices[0]) else None
    rank, world_size, groups = _distributed(path, table.get("distributedInfo"))
    return KinetoTrace(
        path=path, rank=rank, world_size=world_size, groups=groups,
        device=name[:60] if isinstance(name, str) and name else "cpu",
        events=tuple(sorted(events, key=lambda event: (event.start_ns, -event.end_ns))),
    )


def _table(path: Path) -> Any:
    try:
        if not path.is_file():
            raise OSError
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unfit(path, "a trace of torch.profiler", obstacle(path, error)) from None
    except (EOFError, zlib.error) as error:
        raise _unfit(path, "a file that can be read", str(error)[:100]) from None
    if len(data) > MAX_BYTES:
        raise _unfit(path, f"at most {MAX_BYTES:,} B of JSON", "more")
    try:
        return loads(data)
    except TwiceError as error:
        raise _unfit(path, "JSON of torch.profiler", str(error)) from None
    except (ValueError, RecursionError):
        raise _unfit(path, "JSON of torch.profiler", "no JSON") from None


def _event(path: Path, number: int, row: dict[str, Any]) -> TraceEvent:
    start, length, args = row.get("ts", -1), row.get("dur", 0), row.get("args", {})
    if not (_is_time(start) and _is_time(length) and _is_table(args)):
        raise _unfit(path, f"ts, dur and args of event {number}", shown(row)[:80])
    begin = round(float(start) * 1000)
    return TraceEvent(
        str(row.get("name", ""))[:400], str(row.get("cat", ""))[:40],
        f"{row.get('pid')}/{row.get('tid')}"[:80], begin,
        begin + round(float(length) * 1000), args,
    )


def _is_time(value: Any) -> bool:
    """True for microseconds that are a finite number and not negative."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and isfinite(value) and 0 <= value < 1e15


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _distributed(path: Path, table: Any) -> tuple[int, int, dict[str, tuple[int, ...]]]:
    """Rank, world size and process groups; those of one rank alone where torch tells none."""
    if table is None:
        return 0, 1, {}
    groups = {}
    try:
        rank, world_size = table["rank"], table["world_size"]
        for group in table.get("pg_config", []):
            groups[str(group["pg_name"])] = tuple(group["ranks"])
        whole = [rank, world_size, *(member for ranks in groups.values() for member in ranks)]
        if not all(type(number) is int for number in whole) or not 0 <= rank < world_size <= 2**20:
            raise TypeError
    except (TypeError, KeyError, AttributeError):
        raise _unfit(
            path, "rank, world_size and pg_config in distributedInfo", shown(table)[:80]
        ) from None
    return rank, world_size, groups


def _unfit(path: Path, expected: str, found: str) -> KinetoError:
    return KinetoError(where=str(path), expected=expected, found=found, remedy=EXPORT)
