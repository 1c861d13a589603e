"""Dumps of torch's flight recorder as files: the JSON of one rank each, from anywhere.

Sizes have limits, and a file that is no such dump is refused by its first defect. What its
collectives mean for each other is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.errors import ZsimError, shown, visible
from zsim.io.json_reader import TwiceError, loads

MAX_BYTES = 256 * 2**20
"""Bytes of a dump at most: a hundred thousand collectives with their stacks."""
MAX_ENTRIES = 200_000
VERSION = "2"
"""Major version of the format that is read; torch 2.13 writes 2.10."""
PICKLE = (
    "a pickle can run code, so zsim reads none; where you trust it: python -c \"import json, "
    "pickle, sys; json.dump(pickle.load(sys.stdin.buffer), sys.stdout, default=list)\" < IN > "
    "OUT.json"
)
WRITE = "torch._C._distributed_c10d._dump_fr_trace_json() on each rank writes one"


class DumpError(ZsimError):
    """A file that is no dump of torch's flight recorder, or not a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpEntry:
    """One collective that a rank issued; `group` is its process group's name, `seq` its number
    there, `at` the place in the user's code."""

    group: str
    seq: int
    op: str
    sizes: tuple[str, str]
    """Shapes of inputs and outputs as text."""
    dtypes: tuple[str, str]
    completed: bool
    created_ns: int
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The collectives that a rank's recorder still had, oldest first, and its process groups."""

    path: Path
    rank: int
    entries: tuple[DumpEntry, ...]
    members: Mapping[str, tuple[int, ...]]
    """Ranks of each group, where the backend told them; NCCL does."""
    descriptions: Mapping[str, str]
    """Each group's description, as "default_pg"."""


def read(path: Path) -> Dump:
    """The dump in a file; its rank is the last number in the file's name. DumpError for anything
    else."""
    table = _table(path)
    version = str(table.get("version", ""))
    if version.partition(".")[0] != VERSION:
        raise _unfit(path, f"a dump of version {VERSION}.x", shown(version), "")
    rows = table.get("entries")
    if not isinstance(rows, list) or len(rows) > MAX_ENTRIES:
        raise _unfit(path, f"at most {MAX_ENTRIES:,} entries in a list", shown(rows)[:60])
    numbers = re.findall(r"\d+", path.stem)
    if not numbers or len(numbers[-1]) > 7:
        raise _unfit(path, "a rank at the end of the file's name", path.name, "as rank_3.json")
    collectives = [row for row in rows if not (isinstance(row, dict) and row.get("is_p2p"))]
    entries = [_entry(path, number, row) for number, row in enumerate(collectives)]
    return Dump(
        path=path, rank=int(numbers[-1]), entries=tuple(entry for entry, _ in entries),
        members=_members(table.get("pg_config")),
        descriptions={entry.group: description for entry, description in entries},
    )


def _table(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise _unfit(path, "a plain file", "none")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _unfit(path, f"at most {MAX_BYTES:,} B", f"{size:,} B", "dump fewer entries")
        data = path.read_bytes()
    except OSError as error:
        raise _unfit(path, "a file that can be read", str(error.strerror)) from None
    if data[:1] == b"\x80":
        raise _unfit(path, "JSON", "a pickle", PICKLE)
    try:
        table = loads(data)
    except TwiceError as error:
        raise _unfit(path, "JSON of the flight recorder", str(error)) from None
    except (ValueError, RecursionError):
        cut = data.rstrip()[-1:] != b"}"
        raise _unfit(
            path, "JSON of the flight recorder", "JSON that was cut" if cut else "no JSON"
        ) from None
    if not isinstance(table, dict):
        raise _unfit(path, "JSON of the flight recorder", "other JSON")
    return table


def _entry(path: Path, number: int, row: Any) -> tuple[DumpEntry, str]:
    try:
        name, description = row["process_group"]
        seq, created = row["collective_seq_id"], row["time_created_ns"]
        if not (type(seq) is int and type(created) is int and isinstance(name, str)):
            raise TypeError
        entry = DumpEntry(
            group=visible(name[:60]), seq=seq,
            op=visible(str(row["profiling_name"])[:60]).rpartition(":")[2],
            sizes=(str(row["input_sizes"])[:200], str(row["output_sizes"])[:200]),
            dtypes=(str(row["input_dtypes"])[:80], str(row["output_dtypes"])[:80]),
            completed=row["state"] == "completed", created_ns=created,
            at=_at(row.get("frames")),
        )
    except (TypeError, KeyError, ValueError):
        raise _unfit(path, f"a collective as entry {number}", shown(row)[:80]) from None
    return entry, visible(str(description)[:60])


def _at(frames: Any) -> str:
    """The first place in the stack outside torch, as "train.py:12"."""
    for frame in frames if isinstance(frames, list) else []:
        file = str(frame.get("filename", "")) if isinstance(frame, dict) else ""
        if file and "/torch/" not in file:
            return visible(f"{file[-80:]}:{frame.get('line')}")
    return ""


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    """Ranks by group; without those that tell none."""
    members = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        ranks = re.findall(r"\d{1,7}", str(group.get("ranks", ""))) if name else []
        if ranks:
            members[visible(name[:60])] = tuple(map(int, ranks))
    return members


def _unfit(path: Path, expected: str, found: str, remedy: str = WRITE) -> DumpError:
    return DumpError(where=str(path), expected=expected, found=found, remedy=remedy)
