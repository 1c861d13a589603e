"""All rings of a Program: prepared once, then at work in each simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import simpy

from zsim.cluster.ring_hops import hops
from zsim.engine.clock import SimpyClock
from zsim.engine.ring_steps.links import shared_lanes
from zsim.engine.ring_steps.part import CollectiveAtWork, MemberPart, MemberQueues
from zsim.engine.ring_steps.plan import RingPlan, ring_plan
from zsim.engine.ring_steps.round_trip import LinkedRing, RoundTrip
from zsim.engine.ring_steps.turns import LinkInTurns
from zsim.engine.ring_steps.whole import WholeCollective
from zsim.engine.ring_steps.work import (
    SHARED,
    IssuedCollective,
    collectives,
    num_hops,
    require_few,
)
from zsim.engine.timeline import RingCosts
from zsim.ir.program import Program
from zsim.ir.run import HopRecord

Communicator = tuple[str, tuple[int, ...]]
"""The name of a group, and its ranks."""
RunAlone = Callable[[Communicator, int, Callable[[], None]], None]
"""Runs what is no ring's and takes so many ns alone on its links, and calls back at its end."""


class Rings:
    """The rings of a Program's communicators, and the plans of what goes round them."""

    def __init__(self, program: Program, costs: RingCosts, *, contention: bool) -> None:
        """EventsError for too many hops. Without `contention` no two rings share a link."""
        num_sends = num_hops(program, costs)
        require_few(num_sends)
        self.costs = costs
        issued = [(each, count) for each, count in collectives(program) if each.goes_round(costs)]
        ways = {
            key: hops(costs.cluster, key[1])
            for key in dict.fromkeys((each.group, each.ranks) for each, _ in issued)
        }
        self.num_links, lanes = shared_lanes(ways) if contention else (0, {})
        self.rings = {
            key: LinkedRing(
                group=key[0],
                hops=way,
                nodes=tuple([costs.cluster.node_of(rank) for rank in key[1]]),
                lanes=tuple([lanes.get((key, position), ()) for position in range(len(way))]),
            )
            for key, way in ways.items()
        }
        self.plans = {
            each: ring_plan(
                each.kind,
                each.nbytes,
                root=each.root,
                hops=ways[each.group, each.ranks],
                costs=costs,
            )
            for each, _ in issued
        }
        self.events = num_sends + sum(count * self._shared(each) for each, count in issued)
        """Hops of chunks, and their ways over shared links, in a step."""
        self.require_few()

    def require_few(self, seeds: int = 1) -> None:
        """EventsError where so many simulations have too many events."""
        require_few(self.events * seeds, kind=SHARED)

    def at_work(
        self, clock: SimpyClock, *, run_alone: RunAlone, records: list[HopRecord] | None
    ) -> RingsAtWork:
        """The rings in the simulation with that `clock`."""
        return RingsAtWork(self, clock.environment, run_alone=run_alone, records=records)

    def _shared(self, collective: IssuedCollective) -> int:
        """Ways over shared links that the chunks of a collective take."""
        ring, plan = self.rings[collective.group, collective.ranks], self.plans[collective]
        return sum(
            len(lanes) * len(moves) for lanes, moves in zip(ring.lanes, plan.moves, strict=True)
        )


class RingsAtWork:
    """The rings of a Program in one simulation; `records`, if any, get their hops."""

    def __init__(
        self,
        rings: Rings,
        environment: simpy.Environment,
        *,
        run_alone: RunAlone,
        records: list[HopRecord] | None,
    ) -> None:
        self.rings, self.environment = rings, environment
        self.run_alone, self.records = run_alone, records
        self.links = [LinkInTurns(environment) for _ in range(rings.num_links)]
        self.queues: dict[Communicator, MemberQueues] = {}

    def enter(
        self, signature: tuple[str, int, int], communicator: Communicator, number: int, *,
        name: str, position: int, ready_ns: int, longer_ns: int,
        over: Callable[[int, int, int], None],
    ) -> None:
        """Let a rank take its MemberPart in the collective with that `number` on its
        `communicator`, once its parts in all before are over; `signature`: its kind, bytes and
        root."""
        collective = IssuedCollective(*signature, *communicator)
        part = MemberPart(
            name=name, position=position, ready_ns=ready_ns, longer_ns=longer_ns, over=over
        )
        if communicator not in self.queues:
            self.queues[communicator] = MemberQueues(self.environment)
        self.queues[communicator].enter(number, part, partial(self._made, collective))

    def _made(self, collective: IssuedCollective) -> CollectiveAtWork:
        key = collective.group, collective.ranks
        plan: RingPlan | None = self.rings.plans.get(collective)
        if plan is None:
            return WholeCollective(
                self.environment,
                size=len(collective.ranks),
                alone_ns=self.rings.costs.collective_ns(
                    collective.kind, collective.nbytes, collective.ranks
                ),
                run=partial(self.run_alone, key),
            )
        return RoundTrip(
            self.environment, self.rings.rings[key], plan, links=self.links, records=self.records
        )
