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
from zsim.io.files import obstacle
from zsim.io.json_reader import TwiceError, loads

MAX_BYTES = 256 * 2**20
"""Bytes of a dump at most: a hundred thousand collectives with their stacks."""
MAX_ENTRIES = 200_000
VERSION = "2"
"""Major version of the format that is read; torch 2.13 writes 2.10."""
DEFAULT_GROUP = "default_pg"
"""Description of the group of all ranks."""
TORCH = re.compile("(site|dist)-packages/torch/")
"""Part of a path that is torch's own."""
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
    """One collective or point-to-point op that a rank issued; `group` is its process group's name,
    `seq` its number there, `at` the place in the user's code."""

    group: str
    seq: int
    op: str
    sizes: tuple[str, str]
    """Shapes of inputs and outputs as text."""
    dtypes: tuple[str, ...]
    """Dtypes of inputs and outputs, each once: a rank that is no root has only either."""
    completed: bool
    ended: bool
    """True as well where a work of gloo has ended; its dump does not tell whether it failed."""
    created_ns: int
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Entries that a rank's recorder still had, oldest first, and its process groups."""

    path: Path
    rank: int
    entries: tuple[DumpEntry, ...]
    """Collectives, without sends and receives."""
    p2p: tuple[DumpEntry, ...]
    """Sends and receives."""
    members: Mapping[str, tuple[int, ...]]
    """Ranks of each group, where the backend told them; NCCL does."""
    descriptions: Mapping[str, str]
    """Each group's description, as "default_pg"."""


def read(path: Path) -> Dump:
    """The dump in a file, whose name tells its rank. DumpError for anything else."""
    table = _table(path)
    version = str(table.get("version", ""))
    if version.partition(".")[0] != VERSION:
        raise _unfit(path, f"a dump of version {VERSION}.x", shown(version), "")
    rows = table.get("entries")
    if not isinstance(rows, list) or len(rows) > MAX_ENTRIES:
        raise _unfit(path, f"at most {MAX_ENTRIES:,} entries in a list", shown(rows)[:60])
    rank = _rank(path)
    entries = [_entry(path, number, row) for number, row in enumerate(rows)]
    descriptions = {entry.group: text for _, entry, text in entries}
    members = _members(path, table.get("pg_config"))
    for group, ranks in members.items():
        if descriptions.get(group) == DEFAULT_GROUP and rank not in ranks:
            raise _unfit(
                path, f"a dump of rank {rank}, as the file's name says",
                f"one whose {DEFAULT_GROUP} has {len(ranks)} ranks, none of them {rank}",
                "name the file by its rank, as rank_3.json",
            )
    return Dump(
        path=path, rank=rank, members=members, descriptions=descriptions,
        entries=tuple(entry for p2p, entry, _ in entries if not p2p),
        p2p=tuple(entry for p2p, entry, _ in entries if p2p),
    )


def _rank(path: Path) -> int:
    """The number after "rank" in the file's name, else the last number there."""
    numbers = re.findall(r"rank[_-]?(\d+)", path.stem, re.IGNORECASE)
    numbers = numbers or re.findall(r"\d+", path.stem)
    if not numbers or len(numbers[-1]) > 7:
        raise _unfit(path, "a rank in the file's name", path.name, "as rank_3.json")
    return int(numbers[-1])


def _table(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise OSError
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _unfit(path, f"at most {MAX_BYTES:,} B", f"{size:,} B", "dump fewer entries")
        data = path.read_bytes()
    except OSError as error:
        raise _unfit(path, "a dump of a rank", obstacle(path, error)) from None
    if is_pickle(data):
        raise _unfit(path, "JSON", "a pickle", PICKLE)
    try:
        table = loads(data)
    except TwiceError as error:
        raise _unfit(path, "JSON of the flight recorder", str(error)) from None
    except (ValueError, RecursionError):
        opened = max(data.count(b"{") - data.count(b"}"), data.count(b"[") - data.count(b"]"))
        cut = opened > 0 or data.rstrip()[-1:] != b"}"
        raise _unfit(
            path, "JSON of the flight recorder", "JSON that was cut" if cut else "no JSON"
        ) from None
    if not isinstance(table, dict):
        raise _unfit(path, "JSON of the flight recorder", "other JSON")
    return table


def is_pickle(data: bytes) -> bool:
    """True for the beginning of a pickle of a table: protocol 0 writes text, later ones a mark."""
    return data[:1] == b"\x80" or data[:2] in (b"(d", b"(l", b"}q")


def _entry(path: Path, number: int, row: Any) -> tuple[bool, DumpEntry, str]:
    """One row: whether it is point-to-point, its entry, and its group's description."""
    try:
        name, description = row["process_group"]
        p2p = bool(row.get("is_p2p"))
        seq, created = row["collective_seq_id"], row["time_created_ns"]
        if p2p:
            seq = row.get("p2p_seq_id", seq)
        if not (type(seq) is int and type(created) is int and isinstance(name, str)):
            raise TypeError
        backend, _, op = visible(str(row["profiling_name"])[:60]).rpartition(":")
        completed = row["state"] == "completed"
        # gloo's works have no state, but torch retires each that ends; of NCCL's it retires also
        # those that time out
        ended = completed or (backend == "gloo" and row.get("retired") is True)
        entry = DumpEntry(
            group=visible(name[:60]), seq=seq, op=op,
            sizes=(str(row["input_sizes"])[:200], str(row["output_sizes"])[:200]),
            dtypes=_dtypes(row["input_dtypes"], row["output_dtypes"]),
            completed=completed, ended=ended, created_ns=created,
            at=_at(row.get("frames")),
        )
    except (AttributeError, TypeError, KeyError, ValueError):
        raise _unfit(path, f"a collective as entry {number}", shown(row)[:80]) from None
    return p2p, entry, visible(str(description)[:60])


def _dtypes(*lists: Any) -> tuple[str, ...]:
    if not all(isinstance(each, list) for each in lists):
        raise TypeError
    return tuple(sorted({visible(str(dtype)[:20]) for each in lists for dtype in each}))


def _at(frames: Any) -> str:
    """The first place in the stack outside torch, as "train.py:12"."""
    for frame in frames if isinstance(frames, list) else []:
        file = str(frame.get("filename", "")) if isinstance(frame, dict) else ""
        if file and not TORCH.search(file):
            return visible(f"{file[-80:]}:{frame.get('line')}")
    return ""


def _members(path: Path, config: Any) -> dict[str, tuple[int, ...]]:
    """Ranks by group; without those that tell none."""
    if config is not None and not isinstance(config, dict):
        raise _unfit(path, "groups by name in pg_config", shown(config)[:80])
    members = {}
    for name, group in (config or {}).items():
        if not isinstance(group, dict):
            raise _unfit(path, f"a table as pg_config {shown(name)[:60]}", shown(group)[:80])
        ranks = re.findall(r"\d{1,7}", str(group.get("ranks", ""))) if name else []
        if ranks:
            members[visible(name[:60])] = tuple(map(int, ranks))
    return members


def _unfit(path: Path, expected: str, found: str, remedy: str = WRITE) -> DumpError:
    return DumpError(where=str(path), expected=expected, found=found, remedy=remedy)
