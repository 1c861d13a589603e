"""Explanation of a hang from its ranks' flight recorders: another collective, missing and late
ranks, rings of waits. A collective that all ranks are in and none ends is told, too.

Collectives of a group are matched by their number there. The first in which ranks hang is the
cause; what a group issued after it is a consequence and not told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from statistics import median
from typing import Any

from zsim.analysis.flight_recorder.dump_file import DEFAULT_GROUP, Dump, DumpEntry
from zsim.analysis.flight_recorder.finding import (
    KINDS,
    Calls,
    DumpFinding,
    at,
    awaited,
    newest,
)
from zsim.analysis.flight_recorder.one_job import far_apart
from zsim.analysis.flight_recorder.order import head, opposite
from zsim.io.units import format_time
from zsim.ir.order.waits import MOST_TOLD, Wait, named_ranks

UNEVEN = ("gather", "scatter", "all_to_all", "alltoall", "alltoall_base", "reduce_scatter_v",
          "all_gather_v", "_all_to_all_base")
"""Collectives in which ranks may have different sizes."""
FEWEST_MATCHED = 8
"""Matched collectives from which on a rank counts as late."""
LATE_NS = 1_000_000
"""Median delay behind the rank before it, from which a rank counts as late."""


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
    called = {group: f"{names[group] or 'group'} {group}" for group in calls}
    heads = {group: head(called[group], own, members[group]) for group, own in calls.items()}
    rings = list(opposite({group: of for group, of in heads.items() if of}))
    ringed = {group for _, ring in rings for group in ring}
    findings = [
        finding
        for group, of_ranks in calls.items()
        for finding in _differences(called[group], of_ranks, members[group], by_rank)
        if not (finding.kind == "unfinished" and group in ringed)
    ]
    waits = tuple(_waits(by_rank, calls, members))
    findings += [*far_apart(dumps), *(ring for ring, _ in rings), *_point_to_point(dumps)]
    findings += _late(calls)
    order = {kind: number for number, kind in enumerate(KINDS)}
    findings.sort(key=lambda finding: (
        finding.completed, order[finding.kind], finding.group, finding.seq
    ))
    return Explanation(
        ranks=tuple(sorted(by_rank)), groups=len(calls),
        collectives=sum(len({seq for own in of.values() for seq in own}) for of in calls.values()),
        findings=tuple(findings), waits=waits, unread=tuple(unread),
    )


def _by_group(dumps: Sequence[Dump]) -> dict[str, Calls]:
    calls: dict[str, Calls] = {}
    for dump in dumps:
        for entry in dump.entries:
            own = calls.setdefault(entry.group, {}).setdefault(dump.rank, {})
            own.setdefault(entry.seq, []).append(entry)
    return calls


def _members(by_rank: Mapping[int, Dump], calls: Mapping[str, Calls]) -> dict[str, list[int]]:
    """The ranks of each group, with or without a dump: those told and those that have used it.
    Where none are told, the default group has all ranks."""
    members = {}
    for group, of_ranks in calls.items():
        numbers = {rank for dump in by_rank.values() for rank in dump.members.get(group, ())}
        if not numbers and any(
            dump.descriptions.get(group) == DEFAULT_GROUP for dump in by_rank.values()
        ):
            numbers = set(by_rank)
        members[group] = sorted(numbers | of_ranks.keys())
    return members


def _differences(
    called: str, calls: Calls, members: Sequence[int], by_rank: Mapping[int, Dump]
) -> Iterator[DumpFinding]:
    """The first collective in which the ranks of a group hang. Before it come those that ranks
    issued otherwise and yet completed, the first of each kind."""
    first = max((min(own) for own in calls.values()), default=0)  # older ones are overwritten
    kinds, last = set[str](), newest(calls)
    for seq in sorted({seq for own in calls.values() for seq in own if seq >= first}):
        present = {rank: calls[rank][seq] for rank in members if seq in calls.get(rank, {})}
        expected = awaited(calls, members, seq, last)
        completed = all(
            entry.completed or (entry.ended and not expected)
            for entries in present.values() for entry in entries
        )
        findings = _unlike(seq, called, present, completed=completed)
        if completed:
            findings = [finding for finding in findings if finding.kind not in kinds]
            kinds |= {finding.kind for finding in findings}
            yield from findings
            continue
        findings += _absent(seq, called, present, expected, by_rank)
        if not findings and not any(e.ended for own in present.values() for e in own):
            findings = [_unfinished(seq, called, present, many=len(by_rank) > 1)]
        yield from findings
        if findings:
            return
    lasting = {
        rank: min(seqs) for rank, own in sorted(calls.items())
        if (seqs := [seq for seq, of in own.items() if not all(e.ended for e in of)])
    }
    if lasting:
        seq = min(lasting.values())
        inside = {rank: calls[rank][seq] for rank, own in lasting.items() if own == seq}
        yield _unfinished(seq, called, inside, many=True, passed=[*{*members} - {*inside}])


def _unlike(
    seq: int, called: str, present: Mapping[int, list[DumpEntry]], *, completed: bool
) -> list[DumpFinding]:
    """The first aspect in which ranks issue a collective otherwise than others."""
    for kind, of in ASPECTS.items():
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, entries in present.items():
            aspects = tuple(of(entry) for entry in entries)
            if () not in aspects:  # a rank without tensors has no dtype
                alike[aspects].append(rank)
        if len(alike) > 1:
            odd, *others = sorted(alike.items(), key=lambda item: (len(item[1]), -item[1][0]))
            apart = next(
                index for index in range(max(map(len, alike)))
                if len({each[index:index + 1] for each in alike}) > 1
            )
            issued = "; ".join(
                f"{named_ranks(ranks)} {_issued(present[ranks[0]][apart:apart + 1], kind)}"
                for _, ranks in (odd, *others)[:MOST_TOLD]
            )
            all_have = ", which all have completed" if completed else ""
            return [DumpFinding(
                kind=kind, group=called, seq=seq, ranks=tuple(odd[1]), completed=completed,
                text=f"#{seq} of {called}{all_have}: {issued}",
            )]
    return []


def _absent(
    seq: int, called: str, present: Mapping[int, list[DumpEntry]], expected: Sequence[int],
    by_rank: Mapping[int, Dump],
) -> list[DumpFinding]:
    """The ranks that have not entered a collective: first those with a dump, then those without."""
    waiting = [rank for rank, own in present.items() if not all(e.completed for e in own)]
    entry = present[waiting[0]][0]
    wait = f"{named_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    findings = []
    if absent := [rank for rank in expected if rank in by_rank]:
        last = "; ".join(_last(by_rank[rank]) for rank in absent[:MOST_TOLD])
        findings.append(DumpFinding(
            kind="missing", group=called, seq=seq, ranks=tuple(absent),
            text=f"#{seq} of {called}: {named_ranks(absent)} never entered {entry.op}, in which "
                 f"{wait}; {last}",
        ))
    if dead := [rank for rank in expected if rank not in by_rank]:
        findings.append(DumpFinding(
            kind="no dump", group=called, seq=seq, ranks=tuple(dead),
            text=f"#{seq} of {called}: no dump of {named_ranks(dead)}, for which {wait} in "
                 f"{entry.op}{at(entry)}",
        ))
    return findings


def _unfinished(
    seq: int, called: str, inside: Mapping[int, list[DumpEntry]], *, many: bool,
    passed: Sequence[int] = (),
) -> DumpFinding:
    """A collective that ranks have entered and not completed, though none is known to be absent."""
    ranks = list(inside)
    entry = next(entry for entry in inside[ranks[0]] if not entry.ended)
    has = "has" if len(ranks) == 1 else "have"
    if passed:
        why = f"{named_ranks(sorted(passed))} {'is' if len(passed) == 1 else 'are'} past it"
        text = f"{named_ranks(ranks)} {has} not completed {entry.op}{at(entry)}; {why}"
    else:
        why = (
            "look at the network and the GPUs, or for a rank without a dump" if many
            else "the dumps of the other ranks would tell why"
        )
        none = "none has" if len(ranks) > 1 else "has not"
        text = f"{named_ranks(ranks)} {has} entered {entry.op}{at(entry)} and {none} completed " \
               f"it: {why}"
    return DumpFinding(
        kind="unfinished", group=called, seq=seq, ranks=tuple(ranks),
        text=f"#{seq} of {called}: {text}",
    )


def _point_to_point(dumps: Sequence[Dump]) -> Iterator[DumpFinding]:
    """The first send or receive of each rank and group that has not ended."""
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        inside: dict[str, list[DumpEntry]] = {}
        for entry in sorted(dump.p2p, key=lambda entry: entry.created_ns):
            if not entry.ended:
                inside.setdefault(entry.group, []).append(entry)
        for group, (entry, *later) in inside.items():
            called = f"{dump.descriptions[group] or 'group'} {group}"
            more = f", nor {len(later)} more after it" if later else ""
            yield DumpFinding(
                kind="point-to-point", group=called, seq=entry.seq, ranks=(dump.rank,),
                text=f"in {called} rank {dump.rank} has not completed {entry.op}{at(entry)}"
                     f"{more}",
            )


def _size(entry: DumpEntry) -> object:
    return None if entry.op in UNEVEN else entry.sizes


ASPECTS = {
    "other op": lambda entry: entry.op,
    "other dtype": lambda entry: entry.dtypes,
    "other size": _size,
}
"""Aspects that all ranks of a collective must have alike, by the kind of finding."""


def _issued(entries: Sequence[DumpEntry], kind: str) -> str:
    if not entries:
        return "issued no more under this number"
    (entry,) = entries
    more = {
        "other dtype": f" of {', '.join(entry.dtypes) or 'no dtype'}",
        "other size": f" of {entry.sizes[0]} into {entry.sizes[1]}",
    }
    return f"issued {entry.op}{more.get(kind, '')}{at(entry)}"


def _last(dump: Dump) -> str:
    if not dump.entries:
        return f"rank {dump.rank} issued nothing"
    entry = max(dump.entries, key=lambda entry: entry.created_ns)
    return f"rank {dump.rank} last issued {entry.op} #{entry.seq} of {entry.group}{at(entry)}"


def _waits(
    by_rank: Mapping[int, Dump], calls: Mapping[str, Calls], members: Mapping[str, Sequence[int]]
) -> Iterator[Wait]:
    """The first collective of each rank that others have not entered."""
    last = {group: newest(own) for group, own in calls.items()}
    expected = cache(lambda group, seq: awaited(calls[group], members[group], seq, last[group]))
    for rank, dump in sorted(by_rank.items()):
        for entry in sorted(dump.entries, key=lambda entry: entry.created_ns):
            if entry.completed:
                continue
            absent = expected(entry.group, entry.seq)
            if absent:
                yield Wait(
                    rank=rank, group=entry.group, seq=entry.seq, op=entry.op,
                    absent=tuple(absent), at=entry.at,
                )
                break


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
