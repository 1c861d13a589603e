"""A finding of `zsim explain`, and what all of its parts share."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.analysis.flight_recorder.dump_file import DumpEntry

Calls = dict[int, dict[int, list[DumpEntry]]]
"""Entries of one group by rank and number."""
KINDS = ("opposite order", "other op", "other dtype", "other size", "missing", "no dump",
         "unfinished", "point-to-point", "late")
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
