"""Attribution of lost time by arrival: the member that comes last holds a collective up.

The one in which it takes longest has waited for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from zsim.engine.folding import Meetings
from zsim.engine.timeline import Timeline
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program
from zsim.ir.run import LateRank, RankRun

Meeting = tuple[str, int]
"""A communicator: its group's name and the first of the ranks that meet there."""


@dataclass(slots=True)
class Arrivals:
    """Arrivals at the collectives of each communicator and their ends, in ns on one clock."""

    _arrived: dict[Meeting, dict[int, dict[int, int]]] = field(default_factory=dict)
    _ends: dict[Meeting, dict[int, int]] = field(default_factory=dict)
    _counts: Counter[tuple[int, Meeting]] = field(default_factory=Counter)

    def add(self, rank: int, meeting: Meeting, arrived_ns: int, end_ns: int) -> None:
        """Note the next collective of `rank` there."""
        arrived = self._arrived.setdefault(meeting, {})
        ends = self._ends.setdefault(meeting, {})
        number = self._counts[rank, meeting]
        self._counts[rank, meeting] += 1
        arrived.setdefault(number, {})[rank] = arrived_ns
        ends[number] = max(end_ns, ends.get(number, 0))

    def late(self) -> tuple[LateRank, ...]:
        """The ranks that came last to some collective and held it up, those that cost most first.

        A rank holds a collective up from when the others and the one before it on the communicator
        were ready. Ranks that come last together are blamed together, each for the whole time.
        """
        held, last_at, collectives = Counter[int](), Counter[int](), Counter[int]()
        for meeting, by_number in self._arrived.items():
            for number, arrived in by_number.items():
                collectives.update(arrived.keys())
                latest = max(arrived.values())
                before = [at for at in arrived.values() if at < latest]
                ready = max([self._ends[meeting].get(number - 1, 0), *before])
                if before and ready < latest:
                    for rank in (rank for rank, at in arrived.items() if at == latest):
                        held[rank] += latest - ready
                        last_at[rank] += 1
        return tuple(
            LateRank(rank=rank, last_at=last_at[rank], collectives=collectives[rank], held_up_ns=ns)
            for rank, ns in sorted(held.items(), key=lambda each: (-each[1], each[0]))
        )


def late_ranks(program: Program, timeline: Timeline) -> tuple[LateRank, ...]:
    """The late ranks of a simulated step, of those that were simulated."""
    arrivals = Arrivals()
    meetings = Meetings(program, timeline.representatives)
    joined = {
        id(ops): [
            (op.index, op.group) for op in ops
            if op.kind in COLLECTIVES and program.mesh.size(op.group) > 1
        ]
        for ops in program.steps
    }
    for rank, times in timeline.ranks.items():
        own = joined[id(program.of_rank(rank).steady)]
        met = {group: (group, meetings.present(group, rank)[0]) for group in {g for _, g in own}}
        for index, group in own:
            arrivals.add(rank, met[group], times.arrived[index], times.ends[index])
    return arrivals.late()


def late_real_ranks(ranks: Sequence[RankRun], mesh: Mesh) -> tuple[LateRank, ...]:
    """The late ranks of a step that all `ranks` recorded on one machine; () where one did not."""
    arrivals = Arrivals()
    begun = [rank.recorded_at_ns for rank in ranks if rank.recorded_at_ns is not None]
    if len(begun) < len(ranks):
        return ()
    first = min(begun, default=0)
    for rank, at in zip(ranks, begun, strict=True):
        for span in sorted(rank.spans, key=lambda span: (span.start_ns, span.end_ns)):
            if span.kind in COLLECTIVES:
                meeting = span.group, mesh.group(span.group, rank.rank)[0]
                arrivals.add(
                    rank.rank, meeting, at - first + span.start_ns,
                    at - first + span.end_ns,
                )
    return arrivals.late()
