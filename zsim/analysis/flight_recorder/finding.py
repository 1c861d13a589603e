"""A finding of `zsim explain`, and what all of its parts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zsim.analysis.flight_recorder.dump_file import DumpEntry

Calls = dict[int, dict[int, list[DumpEntry]]]
"""Entries of one group by rank and number."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Collectives that a rank can complete though others have not entered them."""
KINDS = ("other job", "opposite order", "other op", "other dtype", "other size", "missing",
         "no dump", "unfinished", "point-to-point", "late")
"""Kinds of findings, from what hangs to what only costs time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFinding:
    """One finding: its kind, the ranks at fault first in `text`, and the collective; `seq` counts
    sends and receives by themselves."""

    kind: str
    group: str
    seq: int
    ranks: tuple[int, ...]
    text: str
    completed: bool = False
    """True where the ranks differ but none hangs: all have completed the collective."""


def at(entry: DumpEntry) -> str:
    """The place of an entry in the user's code, as a message ends with it."""
    return f" at {entry.at}" if entry.at else ""


def newest(calls: Calls) -> dict[int, int]:
    """The last number in a group that each rank has entered."""
    return {rank: max(own) for rank, own in calls.items()}


def awaited(
    calls: Calls, members: Sequence[int], seq: int, last: Mapping[int, int]
) -> list[int]:
    """The ranks that have not entered a collective, as far as the dumps tell. A rank without a dump
    has entered what another has completed. `last` are the newest numbers of the group."""
    inside = [entry for own in calls.values() for entry in own.get(seq, ())]
    met = any(entry.completed and entry.op not in ROOTED for entry in inside)
    return [
        rank for rank in members
        if last.get(rank, 0) < seq and not (met and rank not in calls)
    ]
