"""Simulation of a Program in time: host issue, streams, one queue per communicator.

An op starts when the host has issued it, and the op before it on its stream and the ops it waits
for are over. A collective also awaits all its members and the communicator's last collective.
Between collectives ranks share nothing, so times there follow by arithmetic at once
(`zsim.engine.events.rank_schedule`). Each collective, whose start all its members decide, is an
event of the simulation. A member's arrival is known no later than the last completion it depends
on, so no event lies in the past.

Copies to and from the host, and work on it, are events too: they share links and memory of their
node (`zsim.engine.costs.host_work`).

Communicators contend when they share links of a rank and together need more than all of them. Each
running collective then has its max–min fair share (`zsim.engine.contention.link_contention`),
computed again at each start and end; its latency is stretched as well.

Where ring collectives are simulated as steps (`zsim.engine.ring_steps`), each member's part starts
when it arrives itself, and ends by itself.

simpy supplies the event queue (`zsim.engine.clock`). Its processes would cost more than the
arithmetic; `zsim.engine.ring_steps` alone runs some.
`zsim.engine.simulate_step` adds what slows ops down; this file simulates one round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from zsim.engine.clock import SimpyClock
from zsim.engine.contention.link_contention import SharedLinks
from zsim.engine.events.deadlock_report import deadlock_error, endless_error, mismatch_error
from zsim.engine.events.prepared import Communicator, Prepared
from zsim.engine.events.progress import (
    CollectiveProgress,
    CommunicatorQueue,
    RankProgress,
    durations_of,
)
from zsim.engine.events.rank_schedule import Arrival, Segment
from zsim.engine.timeline import NEVER, NO_DELAYS, CostModel, Delays, RingCosts, Timeline, Times
from zsim.ir.program import Program
from zsim.ir.run import HopRecord

if TYPE_CHECKING:
    from zsim.engine.ring_steps.rings import RingsAtWork

UNKNOWN = -1
"""The time of an event that has not happened, in ns."""


def simulate(
    program: Program, *, costs: CostModel, all_ranks: bool = False, delays: Sequence[Delays] = (),
    contention: bool = True, stepwise: RingCosts | None = None,
) -> Timeline:
    """The times of the steady step in ns.

    `all_ranks` simulates every rank in place of one per class (`zsim.engine.folding`). Without
    `contention` no two collectives share a link. `delays`, by rank program, or none. With
    `stepwise` costs rings are simulated as steps, on all ranks. DeadlockError where ranks wait for
    one another forever or disagree on a collective.
    """
    prepared = Prepared(
        program, costs=costs, all_ranks=all_ranks, contention=contention, stepwise=stepwise
    )
    return simulate_round(prepared, delays)


def simulate_round(prepared: Prepared, delays: Sequence[Delays] = ()) -> Timeline:
    """The times of the steady step with `delays`, by rank program, or none. DeadlockError as of
    `simulate`."""
    return _Engine(prepared, delays or [NO_DELAYS] * len(prepared.schedules)).run()


class _Engine:
    """The state of one simulation. Holds no reference cycles, so it is freed without the garbage
    collector."""

    def __init__(self, prepared: Prepared, delays: Sequence[Delays]) -> None:
        self.costs, self.prepared = prepared.costs, prepared
        self.representatives = prepared.representatives
        self.clock = SimpyClock()
        self.links = SharedLinks(self.clock)
        self.hops: list[HopRecord] | None = [] if prepared.note_hops else None
        self.differing: CollectiveProgress | None = None
        """The first collective on which members do not agree."""
        self.endless: list[tuple[int, tuple[int, ...], CollectiveProgress]] = []
        """Collectives that never end, with the ranks that have all entered them, and since when.
        """
        communicators = {
            key: CommunicatorQueue(members=len(key[1]), ranks=ranks, usage=usage)
            for (key, ranks), usage in zip(prepared.groups.items(), prepared.usages, strict=True)
        }
        durations = [
            durations_of(*each)
            for each in zip(prepared.schedules, prepared.alone, delays, strict=True)
        ]
        segments = [schedule.start() for schedule in prepared.schedules]
        self.ranks: list[tuple[RankProgress, Segment]] = []
        for rank, keys in prepared.communicators.items():
            kind = prepared.assignment[rank]
            schedule = prepared.schedules[kind]
            own = {name: communicators[key] for name, key in keys.items()}
            ends = [UNKNOWN] * schedule.num_events
            ends[len(schedule.ops)] = durations[kind].start
            state = RankProgress(
                rank, schedule, durations[kind], own, [UNKNOWN] * schedule.num_events, ends,
                segments[kind].frontier,
            )
            self.ranks.append((state, segments[kind]))
        self.rings: RingsAtWork | None = None
        if prepared.rings is not None:
            self.rings = prepared.rings.at_work(
                self.clock, records=self.hops,
                run_alone=partial(_run_alone, communicators, self.links, self.clock),
            )

    def run(self) -> Timeline:
        """Run the first segment of every rank, then end collectives one by one."""
        for rank, segment in self.ranks:
            self._advance(rank, segment)
        self.clock.run()
        if self.differing is not None:
            raise mismatch_error(self.differing, Counter(self.representatives))
        if self.endless:
            raise endless_error(self.endless, self.costs)
        stuck = [rank for rank, _ in self.ranks if rank.schedule.next_op(rank.frontier)]
        if stuck:
            raise deadlock_error(self.prepared, stuck)
        issued: _Issued = {}
        times = {rank.rank: _times(rank, issued) for rank, _ in self.ranks}
        step = max((max(each.ends, default=0) for each in times.values()), default=0)
        return Timeline(
            ranks=times, representatives=self.representatives, step_time_ns=step,
            hops=tuple(self.hops or ()),
        )

    def _advance(self, rank: RankProgress, segment: Segment) -> None:
        """Let `rank` run `segment`. Every op of every rank passes here, so nothing is looked up
        that a local name can hold."""
        starts, ends = rank.starts, rank.ends
        durations, offsets = rank.durations.durations, rank.durations.offsets
        for event, host_event, others in segment.events:
            ready = ends[host_event] + offsets[event]
            for other in others:
                end = ends[other]
                if end > ready:
                    ready = end
            starts[event] = ready
            ends[event] = ready + durations[event]
        rank.frontier = segment.frontier
        for arrival in segment.arrivals:
            self._arrive(rank, arrival)

    def _leave_device(self, rank: RankProgress, arrival: Arrival) -> None:
        """Let the host, or its link, do the op's work at the speed that other work leaves it."""
        index, begin = arrival.index, rank.starts[arrival.index]
        op = rank.schedule.ops[index]
        alone = self.costs.compute_ns(op.kernels) + rank.durations.longer.get(index, 0)

        def end() -> None:
            if shared := self.clock.now() - begin - alone:
                rank.shared[index] = shared
            self._resume(rank, arrival, begin, self.clock.now())

        delay = begin - self.clock.now()
        if not self.prepared.contention:
            self.clock.after(delay + alone, end)
            return
        usage = self.prepared.host_usage(op, rank.rank)
        self.clock.after(delay, lambda: self.links.begin(usage, alone, end))

    def _arrive(self, rank: RankProgress, arrival: Arrival) -> None:
        if not arrival.group:
            self._leave_device(rank, arrival)
            return
        communicator, ready = rank.communicators[arrival.group], rank.starts[arrival.index]
        collective = communicator.pending.get(arrival.ordinal)
        if collective is None:
            collective = CollectiveProgress(arrival.signature)
            communicator.pending[arrival.ordinal] = collective
        rank.arrived[arrival.index] = ready
        if collective.last is not arrival or collective.durations is not rank.durations:
            # of another program than the member before, or with other delays
            if collective.signature != arrival.signature:
                collective.is_agreed = False
                self.differing = self.differing or collective
            collective.last, collective.durations = arrival, rank.durations
            collective.longer = max(
                collective.longer, rank.durations.longer.get(arrival.index, 0)
            )
        if ready > collective.ready:
            collective.ready = ready
        collective.arrived.append((rank, arrival))
        if self.rings is not None:
            self._join(self.rings, communicator, collective, rank, arrival)
            return
        if len(collective.arrived) < communicator.members:
            return
        following = communicator.pending.get(communicator.next)
        while following is not None and len(following.arrived) == communicator.members:
            del communicator.pending[communicator.next]
            communicator.next += 1
            communicator.waiting.append(following)
            following = communicator.pending.get(communicator.next)
        self._start(communicator)

    def _start(self, communicator: CommunicatorQueue) -> None:
        """Schedule the next collective of a communicator that is idle. Its speed follows from the
        shared links where the communicator contends."""
        if communicator.is_busy or not communicator.waiting:
            return
        communicator.is_busy = True
        collective = communicator.waiting.pop(0)
        begin = max(collective.ready, communicator.free_at)
        own = self.costs.collective_ns(*collective.signature[:2], communicator.ranks)
        if own == NEVER or not collective.is_agreed:
            if collective.is_agreed:
                self.endless.append((begin, communicator.ranks, collective))
            return
        alone = own + collective.longer

        def end() -> None:
            communicator.free_at, communicator.is_busy = self.clock.now(), False
            self._start(communicator)
            shared = communicator.free_at - begin - alone
            for rank, arrival in collective.arrived if shared else ():
                rank.shared[arrival.index] = shared
            self._end(collective, begin, communicator.free_at)

        delay = begin - self.clock.now()
        if not communicator.usage:
            self.clock.after(delay + alone, end)
        elif delay:
            self.clock.after(delay, lambda: self.links.begin(communicator.usage, alone, end))
        else:
            self.links.begin(communicator.usage, alone, end)

    def _join(
        self, rings: RingsAtWork, communicator: CommunicatorQueue, collective: CollectiveProgress,
        rank: RankProgress, arrival: Arrival,
    ) -> None:
        """Let a rank take part in a collective before the others have arrived, and resume the rank
        when its own part is over."""
        kind, nbytes, _ = collective.signature
        is_whole = len(collective.arrived) == communicator.members
        if not collective.is_agreed:
            return
        if self.costs.collective_ns(kind, nbytes, communicator.ranks) == NEVER:
            if is_whole:
                self.endless.append((collective.ready, communicator.ranks, collective))
            return
        if is_whole:
            del communicator.pending[arrival.ordinal]
        index, op = arrival.index, rank.schedule.ops[arrival.index]
        members = communicator.ranks

        def over(begin: int, end: int, lost: int) -> None:
            if lost:
                rank.shared[index] = lost
            self._resume(rank, arrival, begin, end)

        rings.enter(
            (kind, nbytes, op.root), (arrival.group, members), arrival.ordinal,
            name=f"{op.kind} {op.unit}", position=members.index(rank.rank),
            ready_ns=rank.starts[index], longer_ns=rank.durations.longer.get(index, 0), over=over,
        )

    def _end(self, collective: CollectiveProgress, begin: int, end: int) -> None:
        """Resume its members, in the order of their arrivals."""
        for rank, arrival in collective.arrived:
            self._resume(rank, arrival, begin, end)

    def _resume(self, rank: RankProgress, arrival: Arrival, begin: int, end: int) -> None:
        """Let `rank` go on after its collective."""
        index = arrival.index
        rank.starts[index], rank.ends[index] = begin, end
        segment = rank.frontier.get(arrival.stream)
        self._advance(rank, segment or rank.schedule.resume(rank.frontier, arrival.stream))


def _run_alone(
    communicators: Mapping[Communicator, CommunicatorQueue], links: SharedLinks, clock: SimpyClock,
    key: Communicator, alone: int, end: Callable[[], None],
) -> None:
    """Run from now on what takes `alone` with its links to itself, and call `end`."""
    if usage := communicators[key].usage:
        links.begin(usage, alone, end)
    else:
        clock.after(alone, end)


_Issued = dict[tuple[int, ...], list[int]]
"""Times at which a host issued each op, by the schedule and the times of the host's events."""


def _times(rank: RankProgress, known: _Issued) -> Times:
    """The times of a rank's ops. Most hosts issue ops at the same times: those lists are `known`
    and shared."""
    schedule, count = rank.schedule, len(rank.schedule.ops)
    host_times = rank.ends[count:]
    issued = known.get(key := (id(schedule), *host_times))
    if issued is None:
        resumed = (host_times[event - count] for event in schedule.host_events)
        issued = known[key] = [
            time + offset
            for time, offset in zip(resumed, rank.durations.offsets, strict=False)
        ]
    return Times(rank.starts[:count], rank.ends[:count], issued, rank.shared, rank.arrived)
