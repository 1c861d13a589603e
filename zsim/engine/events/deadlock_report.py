"""Errors of steps without an end: ranks that wait for one another, or that disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zsim.engine.events.prepared import Prepared
from zsim.engine.events.progress import CollectiveProgress, RankProgress
from zsim.engine.events.rank_schedule import Arrival
from zsim.engine.timeline import CostModel
from zsim.errors import DeadlockError
from zsim.io.units import format_time
from zsim.ir.ledger import label
from zsim.ir.ops import Op
from zsim.ir.order.waits import Wait, named_ranks, wait_table

SIMULATION = "simulation"
"""The place of an error that is no single rank's."""


class LostLinkError(DeadlockError):
    """A step that cannot end: a collective of all its members needs a lost link."""


def mismatch_error(collective: CollectiveProgress, ranks: Mapping[int, int]) -> DeadlockError:
    """The error of members that issue different collectives. The fewest are blamed; of as many,
    those that arrived last. `ranks`: the number of ranks that each simulated one stands for."""
    issued: dict[tuple[str, int, int], list[tuple[RankProgress, Arrival]]] = {}
    for each in collective.arrived:
        issued.setdefault(each[1].signature, []).append(each)
    fewest = min(
        reversed(issued.values()), key=lambda alike: sum(ranks[rank.rank] for rank, _ in alike)
    )
    (rank, arrival), (other, earlier) = fewest[0], next(
        each for each in collective.arrived if each not in fewest
    )
    op, theirs = rank.schedule.ops[arrival.index], other.schedule.ops[earlier.index]
    return DeadlockError(
        where=f"rank {rank.rank}, op {op.index} ({op.kind} {op.unit})",
        expected=f"the {_signed(theirs)} that rank {other.rank} issues at op {theirs.index} over "
                 f"{op.group}",
        found=_signed(op),
        remedy="ranks of one group must issue the same collectives in the same order",
    )


def _signed(op: Op) -> str:
    """The parts of a collective on which its members agree, as text."""
    return f"{op.kind} of {op.nbytes:,} B" + f" from {op.root}" * (op.kind == "broadcast")


def endless_error(
    collectives: list[tuple[int, tuple[int, ...], CollectiveProgress]], costs: CostModel
) -> LostLinkError:
    """The error of the first of `collectives` over a lost link, which all its ranks have entered.
    """
    begin, ranks, collective = min(collectives, key=lambda each: each[:2])
    rank, arrival = collective.arrived[0]
    op = rank.schedule.ops[arrival.index]
    return LostLinkError(
        where=" and ".join(costs.lost_links(ranks)),
        expected=f"a network that carries the {op.kind} of {op.unit}, {op.nbytes:,} B over "
                 f"{op.group}",
        found=f"a lost link: {named_ranks(ranks)} wait in it forever, from {format_time(begin)} "
              f"into the step on",
        remedy="leave the fault out for a step that ends",
    )


def deadlock_error(prepared: Prepared, stuck: list[RankProgress]) -> DeadlockError:
    """The error whose table has the ring of ranks that wait for one another, and how their Programs
    differ."""
    waits = [wait for rank in stuck for wait in _waits(prepared, rank)]
    table = "\n  ".join(wait_table(prepared.program, waits, section="steady"))
    return DeadlockError(
        where=SIMULATION,
        expected="ranks of one group to issue the same collectives in the same order",
        found=f"a deadlock of {named_ranks([rank.rank for rank in stuck])}:\n  {table}",
    )


def _waits(prepared: Prepared, rank: RankProgress) -> Iterator[Wait]:
    """The collectives at which `rank` has arrived and simulated members of the group have not."""
    for stream in sorted(rank.frontier.arrived):
        index = rank.schedule.queues[stream][rank.frontier.heads[stream]]
        arrival = rank.schedule.arrivals[index]
        members = prepared.communicators[rank.rank][arrival.group][1]
        collective = rank.communicators[arrival.group].pending.get(arrival.ordinal)
        there = {member.rank for member, _ in collective.arrived} if collective else set(members)
        if absent := tuple(member for member in members if member not in there):
            op = f"op {index} ({label(rank.schedule.ops[index])})"
            yield Wait(
                rank=rank.rank, group=arrival.group, seq=arrival.ordinal, op=op, absent=absent
            )
