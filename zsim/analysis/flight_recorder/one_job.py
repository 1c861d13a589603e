"""Dumps of several jobs that were given together: what one job cannot have left is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from zsim.analysis.flight_recorder.dump_file import DEFAULT_GROUP, Dump, DumpError
from zsim.analysis.flight_recorder.finding import DumpFinding
from zsim.io.units import format_time
from zsim.ir.order.waits import named_ranks

APART_NS = 60_000_000_000
"""Time between the entries of some ranks and those of all others, which clocks of nodes hardly
differ by."""


def require_one_job(dumps: Sequence[Dump]) -> None:
    """Nothing; DumpError where two dumps are of the same rank, or of jobs of different ranks."""
    by_rank: dict[int, list[Dump]] = {}
    for dump in dumps:
        by_rank.setdefault(dump.rank, []).append(dump)
    twice = [rank for rank, own in sorted(by_rank.items()) if len(own) > 1]
    if twice:
        _refuse(f"two of {named_ranks(twice)}", *by_rank[twice[0]][:2])
    for first, other in combinations({_world(dump): dump for dump in dumps}.values(), 2):
        if _world(first) and _world(other):
            sizes = f"{len(_world(first))} and of {len(_world(other))}"
            _refuse(f"jobs of {sizes} ranks", first, other)


def _world(dump: Dump) -> tuple[int, ...]:
    """The ranks of the default group; () where the dump does not tell."""
    groups = [name for name, text in dump.descriptions.items() if text == DEFAULT_GROUP]
    return next((dump.members[name] for name in groups if name in dump.members), ())


def _refuse(found: str, first: Dump, other: Dump) -> None:
    raise DumpError(
        where=str(other.path), expected="dumps of one job, one of each rank",
        found=f"{found}, as {first.path} and this", remedy="explain each job by itself",
    )


def far_apart(dumps: Sequence[Dump]) -> Iterator[DumpFinding]:
    """The ranks whose entries begin long after those of all others end, as another job's do."""
    spans = sorted(
        (min(times), max(times), dump.rank)
        for dump in dumps if (times := [entry.created_ns for entry in (*dump.entries, *dump.p2p)])
    )
    ended = 0
    for number, (begin, end, _) in enumerate(spans):
        if number and begin - ended > APART_NS:
            earlier, later = (
                sorted(rank for _, _, rank in part) for part in (spans[:number], spans[number:])
            )
            yield DumpFinding(
                kind="other job", group="", seq=0, ranks=tuple(later),
                text=f"{named_ranks(later)} issued nothing until {format_time(begin - ended)} "
                     f"after the last of {named_ranks(earlier)}: if these are dumps of two jobs, "
                     "explain each by itself",
            )
            return
        ended = max(ended, end)
