"""Explanation of a hang from its ranks' flight recorders: another collective, missing and late
ranks, ranks that wait for each other.

Collectives of a group are matched by their number there. The first that differs is the cause; what
a group issued after it is a consequence and not told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from zsim.analysis.flight_recorder.dump_file import Dump, DumpEntry
from zsim.io.units import format_time
from zsim.ir.order.waits import MOST_TOLD, Wait, named_ranks, rings

UNEVEN = ("gather", "scatter", "all_to_all", "alltoall", "alltoall_base", "reduce_scatter_v",
          "all_gather_v", "_all_to_all_base")
"""Collectives in which ranks may have different sizes."""
FEWEST_MATCHED = 8
"""Matched collectives from which on a rank counts as late."""
LATE_NS = 1_000_000
"""Median delay behind the rank before it, from which a rank counts as late."""
Calls = dict[int, dict[int, list[DumpEntry]]]
"""Entries of one group by rank and number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFinding:
    """One finding: its kind, the ranks at fault first in `text`, and the collective."""

    kind: str
    group: str
    seq: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Findings, the causes first, the waits of all ranks, and how much was matched."""

    ranks: tuple[int, ...]
    collectives: int
    groups: int
    findings: tuple[DumpFinding, ...] = ()
    waits: tuple[Wait, ...] = ()
    unread: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """The object of `zsim explain --json`."""
        return asdict(self)


def explain(dumps: Sequence[Dump], *, unread: Sequence[str] = ()) -> Explanation:
    """The explanation of the dumps of one job, one of each rank."""
    by_rank = {dump.rank: dump for dump in dumps}
    names = {name: text for dump in dumps for name, text in dump.descriptions.items()}
    calls = _by_group(dumps)
    members = _members(by_rank, calls)
    findings = [
        finding
        for group, of_ranks in calls.items()
        for finding in _first_difference(group, names[group], of_ranks, members[group], by_rank)
    ]
    waits = tuple(_waits(by_rank, calls, members))
    findings += [*_opposite(waits), *_late(calls)]
    order = {kind: number for number, kind in enumerate(KINDS)}
    findings.sort(key=lambda finding: (order[finding.kind], finding.group, finding.seq))
    return Explanation(
        ranks=tuple(sorted(by_rank)), groups=len(calls),
        collectives=sum(len({seq for own in of.values() for seq in own}) for of in calls.values()),
        findings=tuple(findings), waits=waits, unread=tuple(unread),
    )


KINDS = ("opposite order", "other op", "other dtype", "other size", "missing", "late")
"""Kinds of findings, from what hangs to what only costs time."""


def _by_group(dumps: Sequence[Dump]) -> dict[str, Calls]:
    calls: dict[str, Calls] = {}
    for dump in dumps:
        for entry in dump.entries:
            own = calls.setdefault(entry.group, {}).setdefault(dump.rank, {})
            own.setdefault(entry.seq, []).append(entry)
    return calls


def _members(by_rank: Mapping[int, Dump], calls: Mapping[str, Calls]) -> dict[str, list[int]]:
    """The ranks of each group of which there is a dump: those told, all of the default group, else
    those that have used it."""
    members = {}
    for group, of_ranks in calls.items():
        told = {rank for dump in by_rank.values() for rank in dump.members.get(group, ())}
        default = any(
            dump.descriptions.get(group) == "default_pg" for dump in by_rank.values()
        )
        members[group] = sorted((told or (by_rank if default else of_ranks)) & by_rank.keys())
    return members


def _first_difference(
    group: str, name: str, calls: Calls, members: Sequence[int], by_rank: Mapping[int, Dump]
) -> Iterator[DumpFinding]:
    """The first collective of a group that its ranks do not issue alike."""
    called = f"{name or 'group'} {group}"
    first = max((min(own) for own in calls.values()), default=0)  # older ones are overwritten
    for seq in sorted({seq for own in calls.values() for seq in own if seq >= first}):
        present = {rank: calls[rank][seq] for rank in members if seq in calls.get(rank, {})}
        for kind, of in ASPECTS.items():
            alike: dict[object, list[int]] = defaultdict(list)
            for rank, entries in present.items():
                alike[tuple(of(entry) for entry in entries)].append(rank)
            if len(alike) > 1:
                odd, *others = sorted(alike.items(), key=lambda item: (len(item[1]), -item[1][0]))
                told = "; ".join(f"{named_ranks(ranks)} {_issued(present[ranks[0]], kind)}"
                                 for _, ranks in (odd, *others)[:MOST_TOLD])
                yield DumpFinding(
                    kind=kind, group=called, seq=seq, ranks=tuple(odd[1]),
                    text=f"#{seq} of {called}: {told}",
                )
                return
        absent = [rank for rank in members if max(calls.get(rank, {0: []})) < seq]
        if absent and present and not all(e.completed for es in present.values() for e in es):
            inside = next(iter(present.values()))[0].op
            last = "; ".join(_last(by_rank[rank]) for rank in absent[:MOST_TOLD])
            yield DumpFinding(
                kind="missing", group=called, seq=seq, ranks=tuple(absent),
                text=f"#{seq} of {called}: {named_ranks(absent)} never entered {inside}, in which "
                     f"{named_ranks(list(present))} "
                     f"{'waits' if len(present) == 1 else 'wait'}; {last}",
            )
            return


def _size(entry: DumpEntry) -> object:
    return None if entry.op in UNEVEN else entry.sizes


ASPECTS = {
    "other op": lambda entry: entry.op,
    "other dtype": lambda entry: entry.dtypes,
    "other size": _size,
}
"""Aspects that all ranks of a collective must have alike, by the kind of finding."""


def _issued(entries: Sequence[DumpEntry], kind: str) -> str:
    entry = entries[0]
    more = {"other dtype": f" of {entry.dtypes[0]}", "other size": f" of {entry.sizes[0]}"}
    return f"issued {entry.op}{more.get(kind, '')}{f' at {entry.at}' if entry.at else ''}"


def _last(dump: Dump) -> str:
    if not dump.entries:
        return f"rank {dump.rank} issued nothing"
    entry = max(dump.entries, key=lambda entry: entry.created_ns)
    at = f" at {entry.at}" if entry.at else ""
    return f"rank {dump.rank} last issued {entry.op} #{entry.seq} of {entry.group}{at}"


def _waits(
    by_rank: Mapping[int, Dump], calls: Mapping[str, Calls], members: Mapping[str, Sequence[int]]
) -> Iterator[Wait]:
    """The first collective of each rank that others have not entered."""
    for rank, dump in sorted(by_rank.items()):
        for entry in sorted(dump.entries, key=lambda entry: entry.created_ns):
            if entry.completed:
                continue
            of = calls[entry.group]
            absent = [
                other for other in members[entry.group]
                if max(of.get(other, {0: []})) < entry.seq
            ]
            if absent:
                yield Wait(
                    rank=rank, group=entry.group, seq=entry.seq, op=entry.op,
                    absent=tuple(absent), at=entry.at,
                )
                break


def _opposite(waits: Sequence[Wait]) -> Iterator[DumpFinding]:
    """The rings of ranks that wait for each other, each told once."""
    for ring in rings(waits):
        steps = "; ".join(
            f"rank {wait.rank} waits in {wait.op} #{wait.seq} of {wait.group}" for wait in ring
        )
        yield DumpFinding(
            kind="opposite order", group=ring[0].group, seq=ring[0].seq,
            ranks=tuple(wait.rank for wait in ring),
            text=f"groups are used in another order by other ranks: {steps}",
        )


def _late(calls: Mapping[str, Calls]) -> Iterator[DumpFinding]:
    """Ranks that come last to most collectives of a group, by the clocks of their nodes."""
    for group, of_ranks in calls.items():
        last, delays = Counter[int](), defaultdict[int, list[int]](list)
        shared = set.intersection(*(set(own) for own in of_ranks.values()))
        for seq in shared if len(of_ranks) > 1 else ():
            arrivals = sorted((own[seq][0].created_ns, rank) for rank, own in of_ranks.items())
            last[arrivals[-1][1]] += 1
            delays[arrivals[-1][1]].append(arrivals[-1][0] - arrivals[-2][0])
        for rank, times in last.most_common(1):
            behind = int(median(delays[rank]))
            if len(shared) >= FEWEST_MATCHED and 2 * times > len(shared) and behind >= LATE_NS:
                yield DumpFinding(
                    kind="late", group=group, seq=max(shared), ranks=(rank,),
                    text=f"rank {rank} comes last to {times} of {len(shared)} collectives of "
                         f"{group}, by {format_time(behind)} in the median (by the clocks of the "
                         "nodes)",
                )
