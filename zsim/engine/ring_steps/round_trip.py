"""One collective on a ring: a process for each rank's part, which sends chunk after chunk.

Read `_send_all` aloud for the algorithm. For each of its sends a rank waits until it has the chunk
and the next rank is there. Then the chunk passes the hop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from zsim.cluster.ring_hops import Hop
from zsim.engine.ring_steps.links import Lane
from zsim.engine.ring_steps.part import MemberPart, PartProcess, Process
from zsim.engine.ring_steps.plan import Move, RingPlan
from zsim.engine.ring_steps.step_times import shared_out
from zsim.engine.ring_steps.turns import LinkInTurns
from zsim.ir.run import HopRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedRing:
    """The ring of a communicator: its hops, the node of each rank, and by position the lanes that
    hops have on shared links."""

    group: str
    hops: tuple[Hop, ...]
    nodes: tuple[int, ...]
    lanes: tuple[tuple[Lane, ...], ...]

    @property
    def has_channels(self) -> bool:
        """True where it is over several nodes, and a node has several ranks."""
        return 1 < len(set(self.nodes)) < len(self.nodes)


class Inbox:
    """The number of chunks that a rank has received, and the event that it awaits."""

    __slots__ = ("_awaited", "_needed", "count")

    def __init__(self) -> None:
        self.count = self._needed = 0
        self._awaited: simpy.Event | None = None

    def put(self) -> None:
        """Add a chunk."""
        self.count += 1
        if self._awaited is not None and self.count >= self._needed:
            self._awaited.succeed()
            self._awaited = None

    def holds(self, needed: int, environment: simpy.Environment) -> simpy.Event:
        """The event of the last of `needed` chunks, which has not come."""
        self._needed, self._awaited = needed, environment.event()
        return self._awaited


class RoundTrip:
    """One collective while its chunks go round.

    >>> from zsim.cluster.cluster_presets import load_cluster
    >>> from zsim.cluster.ring_hops import hops
    >>> from zsim.engine.costs.op_costs import Costs
    >>> from zsim.engine.ring_steps.plan import ring_plan
    >>> costs = Costs(load_cluster("cpu-gloo", ranks=4))
    >>> way = hops(costs.cluster, (0, 1, 2, 3))
    >>> plan = ring_plan("all_gather", 400_000, root=0, hops=way, costs=costs)
    >>> ring = LinkedRing(group="dp_shard", hops=way, nodes=(0,) * 4, lanes=((),) * 4)
    >>> environment, records = simpy.Environment(), []
    >>> trip = RoundTrip(environment, ring, plan, links=(), records=records)
    >>> for rank in range(4):
    ...     part = MemberPart(name="a", position=rank, ready_ns=0, longer_ns=0, over=print)
    ...     _ = environment.process(trip.take_part(part))
    >>> environment.run()
    >>> sorted((hop.step, hop.source, hop.destination) for hop in records)
    [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 0), (1, 0, 1), (1, 1, 2), (1, 2, 3), (1, 3, 0), \
(2, 0, 1), (2, 1, 2), (2, 2, 3), (2, 3, 0)]
    >>> environment.now == plan.alone_ns == costs.collective_ns("all_gather", 400_000, (0, 1, 2, 3))
    True
    """

    def __init__(
        self,
        environment: simpy.Environment,
        ring: LinkedRing,
        plan: RingPlan,
        *,
        links: Sequence[LinkInTurns],
        records: list[HopRecord] | None,
    ) -> None:
        """`links` are the shared ones by number; hops are noted in `records` if there are any."""
        self.environment, self.ring, self.plan = environment, ring, plan
        self.links, self.records = links, records
        self.inboxes = [Inbox() for _ in ring.hops]
        self.came = [environment.event() for _ in ring.hops]
        """Events of the ranks' being there to send and to receive."""
        self.moved_ns: list[int | None] = [None] * len(ring.hops)
        """Start of the first hop from or to each rank."""
        self.missing, self.last_ns, self.longer_ns = len(ring.hops), 0, 0
        """Ranks that are still to come, when the last of the others came, and the most that any of
        them takes longer."""
        self.at_work = Counter(ring.nodes)
        """Ranks by node whose sends and receives are not over."""
        self.node_over = {node: environment.event() for node in self.at_work}

    def take_part(self, part: MemberPart) -> PartProcess:
        """Process of a rank's part: it comes, launches, sends and receives all its chunks.

        A ring over several nodes stands for as many as a node has NICs. These are alike but for the
        rank with which they leave the node, so a node's ranks end together.
        """
        environment, position, inbox = (
            self.environment,
            part.position,
            self.inboxes[part.position],
        )
        self.missing, self.last_ns = self.missing - 1, int(environment.now)
        self.longer_ns = max(self.longer_ns, part.longer_ns)
        yield environment.timeout(self.plan.launch_ns)
        self.came[position].succeed()
        yield from self._send_all(part)
        if inbox.count < self.plan.receives[position]:
            yield inbox.holds(self.plan.receives[position], environment)
        if self.ring.has_channels:
            yield self._rest_of(self.ring.nodes[position])
        moved = self.moved_ns[position]
        assert moved is not None  # every rank sends or receives something
        return moved - self.plan.launch_ns, self._lost_ns()

    def _send_all(self, part: MemberPart) -> Process:
        """The sends of a rank, one after another."""
        position, inbox = part.position, self.inboxes[part.position]
        following = (position + 1) % len(self.inboxes)
        longer = shared_out(part.longer_ns, [1] * self.plan.num_steps)
        for move in self.plan.moves[position]:
            if inbox.count < move.needed:
                yield inbox.holds(move.needed, self.environment)
            yield self.came[following]
            begin, latency_ns = int(self.environment.now), move.latency_ns + longer[move.step]
            self._note_moved(position, following, begin)
            yield from self._pass(position, move, latency_ns)
            self.inboxes[following].put()
            if self.records is not None:
                self.records.append(self._record(part, move.step, begin, move.pace_ns + latency_ns))

    def _pass(self, position: int, move: Move, latency_ns: int) -> Process:
        """A chunk on its hop: by turns on shared links, at the hop's own pace at best, then its
        latency."""
        environment, lanes = self.environment, self.ring.lanes[position]
        left_ns = move.pace_ns
        if lanes:
            due_ns = int(environment.now) + move.pace_ns
            yield self._over_lanes(lanes, move)
            left_ns = max(0, due_ns - int(environment.now))
        yield environment.timeout(left_ns + latency_ns)

    def _over_lanes(self, lanes: Sequence[Lane], move: Move) -> simpy.Event:
        """The event of a chunk's end on the last of its shared links."""
        passed, missing = self.environment.event(), len(lanes)

        def over() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                passed.succeed()

        for lane in lanes:
            self.links[lane.link].carry(
                lane.hold_ns(move.wire_ns), lane.slices(move.nbytes), over
            )
        return passed

    def _note_moved(self, source: int, destination: int, now: int) -> None:
        for end in (source, destination):
            if self.moved_ns[end] is None:
                self.moved_ns[end] = now

    def _rest_of(self, node: int) -> simpy.Event:
        """The event of the end of all ranks of a node, of which another one is over."""
        self.at_work[node] -= 1
        if not self.at_work[node]:
            self.node_over[node].succeed()
        return self.node_over[node]

    def _lost_ns(self) -> int:
        """Nanoseconds by which it is later now than with its links to itself, the last rank's
        coming and all that ranks take longer allowed for."""
        due = self.last_ns + self.plan.alone_ns + self.longer_ns
        return 0 if self.missing else max(0, int(self.environment.now) - due)

    def _record(self, part: MemberPart, step: int, begin: int, alone_ns: int) -> HopRecord:
        hop, end = self.ring.hops[part.position], int(self.environment.now)
        return HopRecord(
            name=part.name,
            group=self.ring.group,
            step=step,
            source=hop.source,
            destination=hop.destination,
            link=hop.narrowest,
            start_ns=begin,
            end_ns=end,
            lost_ns=end - begin - alone_ns,
        )
