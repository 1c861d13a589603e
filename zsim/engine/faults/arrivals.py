"""Attribution of lost time by arrival: the member that comes last holds a collective up.

The one in which it takes longest has waited for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from zsim.engine.folding import Meetings
from zsim.engine.timeline import Timeline
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program
from zsim.ir.run import LateRank

Meeting = tuple[str, tuple[int, ...]]
"""A communicator: its group's name and the simulated ranks that meet there."""


def late_ranks(program: Program, timeline: Timeline) -> tuple[LateRank, ...]:
    """The ranks that came last to some collective and held it up, those that cost most first.

    A rank holds a collective up from when the others and the one before it on the communicator were
    ready. Ranks that come last together are blamed together, each for the whole time.
    """
    arrivals: dict[Meeting, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    ends: dict[Meeting, dict[int, int]] = defaultdict(dict)
    meetings = Meetings(program, timeline.representatives)
    for rank, times in timeline.ranks.items():
        numbers = Counter[Meeting]()
        met: dict[str, Meeting] = {}
        for op in program.of_rank(rank).steady:
            if op.kind in COLLECTIVES and program.mesh.size(op.group) > 1:
                if op.group not in met:
                    met[op.group] = op.group, meetings.present(op.group, rank)
                number = numbers[met[op.group]]
                numbers[met[op.group]] += 1
                arrivals[met[op.group]][number][rank] = times.arrived[op.index]
                ends[met[op.group]][number] = times.ends[op.index]
    held, last_at = Counter[int](), Counter[int]()
    for meeting, by_number in arrivals.items():
        for number, arrived in by_number.items():
            latest = max(arrived.values())
            free = ends[meeting].get(number - 1, 0)
            ready = max([free, *(at for at in arrived.values() if at < latest)])
            if len(set(arrived.values())) > 1 and ready < latest:
                for rank in (rank for rank, at in arrived.items() if at == latest):
                    held[rank] += latest - ready
                    last_at[rank] += 1
    collectives = Counter(
        rank for by_number in arrivals.values() for arrived in by_number.values()
        for rank in arrived
    )
    return tuple(
        LateRank(rank=rank, last_at=last_at[rank], collectives=collectives[rank], held_up_ns=ns)
        for rank, ns in sorted(held.items(), key=lambda each: (-each[1], each[0]))
    )
