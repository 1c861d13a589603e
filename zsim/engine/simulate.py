"""Simulation of a Program in time: host issue, streams, one queue per communicator.

An op starts when the host has issued it, and the op before it on its stream and the ops it waits
for are over. A collective also awaits all its members and the communicator's last collective.
Between collectives ranks share nothing, so times there follow by arithmetic at once
(`zsim.engine.rank_schedule`). Each collective, whose start all its members decide, is an event of
the simulation. A member's arrival is known no later than the last completion it depends on, so no
event lies in the past.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from zsim.engine.clock import SimpyClock
from zsim.engine.contention.link_contention import SharedLinks, contended
from zsim.engine.contention.max_min_fairness import Usage
from zsim.engine.folding import Meetings, in_step_off_device, representatives
from zsim.engine.rank_schedule import Arrival, Frontier, RankSchedule, Segment
from zsim.engine.timeline import NEVER, NO_DELAYS, CostModel, Delays, RingCosts, Timeline, Times
from zsim.errors import DeadlockError
from zsim.io.units import format_time
from zsim.ir.ledger import label
from zsim.ir.ops import Op
from zsim.ir.order.waits import Wait, named_ranks, wait_table
from zsim.ir.program import Program
from zsim.ir.run import HopRecord

if TYPE_CHECKING:
    from zsim.engine.ring_steps.rings import Rings, RingsAtWork

SIMULATION = "simulation"
"""The place of an error that is no single rank's."""
UNKNOWN = -1
"""The time of an event that has not happened, in ns."""
_Key = tuple[str, tuple[int, ...]]
"""A communicator: the name of its group, and those of its ranks that are simulated."""


class LostLinkError(DeadlockError):
    """A step that cannot end, as a collective that all members enter needs a link that is lost."""


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
    return Prepared(
        program, costs=costs, all_ranks=all_ranks, contention=contention, stepwise=stepwise
    ).simulate(delays)


class Prepared:
    """The part of a simulation that does not depend on the delays of ops."""

    def __init__(
        self, program: Program, *, costs: CostModel, all_ranks: bool = False,
        contention: bool = True, stepwise: RingCosts | None = None, note_hops: bool = False,
    ) -> None:
        """Arguments as of `simulate`; simulations of rings as steps can `note_hops`."""
        self.costs, self.program, self.assignment = costs, program, program.assignment
        self.rings: Rings | None = None
        self.note_hops = note_hops
        all_ranks = all_ranks or stepwise is not None or not in_step_off_device(program)
        if stepwise is not None:
            from zsim.engine.ring_steps.rings import Rings  # start-up: few steps need networkx

            self.rings = Rings(program, stepwise, contention=contention)
        schedules = {
            id(rank.steady): RankSchedule(rank.steady, launch_queue=costs.launch_queue)
            for rank in program.ranks
        }
        alone = {key: _alone(schedule, costs) for key, schedule in schedules.items()}
        self.schedules = [schedules[id(rank.steady)] for rank in program.ranks]
        self.alone = [alone[id(rank.steady)] for rank in program.ranks]
        everyone = tuple(range(program.mesh.world_size))
        self.representatives = everyone if all_ranks else representatives(
            program, duration_ns=costs.collective_ns, usage=costs.usage if contention else None
        )
        self.groups: dict[_Key, tuple[int, ...]] = {}
        """All ranks of each communicator, simulated or not."""
        self.communicators: dict[int, dict[str, _Key]] = {}
        """Communicators by simulated rank and by the name of the group."""
        meetings = Meetings(program, self.representatives)
        names = [schedule.groups for schedule in self.schedules]
        for rank in sorted(set(self.representatives)):
            own = self.communicators[rank] = {}
            for name in names[program.assignment[rank]]:
                group = program.mesh.group(name, rank)
                own[name] = name, group if all_ranks else meetings.present(name, rank)
                self.groups.setdefault(own[name], group)
        self.in_step, self.contention = not all_ranks, contention
        self.host_usages: dict[tuple[int, str, int], Usage] = {}
        """Shares of a node that ops off the device take, by rank, stream and kernels."""
        self.usages: list[Usage] = [{}] * len(self.groups)
        if contention and len(self.groups) > 1:
            self.usages = contended([self._usage(group) for group in self.groups.values()])

    def _usage(self, group: tuple[int, ...]) -> dict[int, Mapping[str, Fraction]]:
        """The share of each simulated rank's links that collectives over `group` take, by rank.

        It equals that of the members that the rank represents.
        """
        return {
            self.representatives[rank]: parts for rank, parts in self.costs.usage(group).items()
        }

    def host_usage(self, op: Op, rank: int) -> Usage:
        """The shares of the rank's node that `op` takes, the same object for one stream's like ops.
        """
        key = rank, op.stream, id(op.kernels)
        if key not in self.host_usages:
            self.host_usages[key] = self.costs.host_usage(op.kernels, rank, in_step=self.in_step)
        return self.host_usages[key]

    def simulate(self, delays: Sequence[Delays] = ()) -> Timeline:
        """The times of the steady step with `delays`, by rank program, or none. DeadlockError as of
        `simulate`."""
        return _Engine(self, delays or [NO_DELAYS] * len(self.schedules)).run()


@dataclass(frozen=True, slots=True)
class _Durations:
    """The durations of a schedule's events, in ns, by event."""

    durations: list[int]
    """Durations of ops; 0 for those that share links and for the host's events."""
    offsets: list[int]
    """The host's work before each event: from its last event to the issue of an op, or to its next
    event."""
    longer: Mapping[int, int]
    """Additions to the time alone, by op."""
    start: int
    """Time at which the host begins the step."""


def _alone(schedule: RankSchedule, costs: CostModel) -> tuple[list[int], list[int]]:
    """The ns of each op, 0 for what shares links, and the ns in which the host issues it."""
    durations = [
        costs.compute_ns(op.kernels) if op.kernels and op.index not in schedule.arrivals else 0
        for op in schedule.ops
    ]
    return durations, [costs.issue_ns(op) for op in schedule.ops]


def _durations(
    schedule: RankSchedule, alone: tuple[list[int], list[int]], delays: Delays
) -> _Durations:
    """The durations of `schedule` with `delays`; `alone` is its `_alone`."""
    durations, offsets = ([0] * schedule.num_events for _ in range(2))
    durations[: len(schedule.ops)] = alone[0]
    for index, extra in delays.longer.items():
        durations[index] += extra if index not in schedule.arrivals else 0
    clock, host_event = 0, len(schedule.ops)
    for index, issue in enumerate(alone[1]):
        if schedule.host_events[index] != host_event:
            host_event = schedule.host_events[index]
            offsets[host_event], clock = clock, 0
        clock += issue
        offsets[index] = clock
        clock += delays.later.get(index, 0)
    return _Durations(durations, offsets, delays.longer, delays.start)


@dataclass(slots=True)
class _Collective:
    """One collective of one communicator, as its members arrive."""

    signature: tuple[str, int, int]
    ready: int = 0
    last: Arrival | None = None
    durations: _Durations | None = None
    """Arrival and durations of the last member so far; members with one program share them."""
    is_agreed: bool = True
    """False where a member has another signature; then it never starts."""
    longer: int = 0
    """The most that overlap on any member adds: the slowest member holds up the others."""
    arrived: list[tuple[_Rank, Arrival]] = field(default_factory=list)


@dataclass(slots=True)
class _Communicator:
    """One queue: collectives start in issue order, each when all members have arrived and the one
    before it is over."""

    members: int
    ranks: tuple[int, ...]
    usage: Usage
    """The share of the simulated ranks' links that its collectives take; empty where it cannot
    contend."""
    free_at: int = 0
    next: int = 0
    pending: dict[int, _Collective] = field(default_factory=dict)
    waiting: list[_Collective] = field(default_factory=list)
    is_busy: bool = False


@dataclass(slots=True)
class _Rank:
    """One rank's progress: its frontier, and the starts and ends of its events so far, in ns."""

    rank: int
    schedule: RankSchedule
    durations: _Durations
    communicators: dict[str, _Communicator]
    starts: list[int]
    ends: list[int]
    frontier: Frontier
    shared: dict[int, int] = field(default_factory=dict)
    """The ns that each collective or copy took longer because it shared its links, by op."""
    arrived: dict[int, int] = field(default_factory=dict)
    """The time from which on each collective waited for other members alone, by op."""


class _Engine:
    """The state of one simulation. Holds no reference cycles, so it is freed without the garbage
    collector."""

    def __init__(self, prepared: Prepared, delays: Sequence[Delays]) -> None:
        self.costs, self.prepared = prepared.costs, prepared
        self.representatives = prepared.representatives
        self.clock = SimpyClock()
        self.links = SharedLinks(self.clock)
        self.hops: list[HopRecord] | None = [] if prepared.note_hops else None
        self.differing: _Collective | None = None
        """The first collective on which members do not agree."""
        self.endless: list[tuple[int, tuple[int, ...], _Collective]] = []
        """Collectives that never end, with the ranks that have all entered them, and since when.
        """
        communicators = {
            key: _Communicator(members=len(key[1]), ranks=ranks, usage=usage)
            for (key, ranks), usage in zip(prepared.groups.items(), prepared.usages, strict=True)
        }
        durations = [
            _durations(*each)
            for each in zip(prepared.schedules, prepared.alone, delays, strict=True)
        ]
        segments = [schedule.start() for schedule in prepared.schedules]
        self.ranks: list[tuple[_Rank, Segment]] = []
        for rank, keys in prepared.communicators.items():
            kind = prepared.assignment[rank]
            schedule = prepared.schedules[kind]
            own = {name: communicators[key] for name, key in keys.items()}
            ends = [UNKNOWN] * schedule.num_events
            ends[len(schedule.ops)] = durations[kind].start
            state = _Rank(
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
            raise _mismatch(self.differing, Counter(self.representatives))
        if self.endless:
            raise _endless(self.endless, self.costs)
        stuck = [rank for rank, _ in self.ranks if rank.schedule.next_op(rank.frontier)]
        if stuck:
            raise _deadlock(self.prepared, stuck)
        issued: _Issued = {}
        times = {rank.rank: _times(rank, issued) for rank, _ in self.ranks}
        step = max((max(each.ends, default=0) for each in times.values()), default=0)
        return Timeline(
            ranks=times, representatives=self.representatives, step_time_ns=step,
            hops=tuple(self.hops or ()),
        )

    def _advance(self, rank: _Rank, segment: Segment) -> None:
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

    def _leave_device(self, rank: _Rank, arrival: Arrival) -> None:
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

    def _arrive(self, rank: _Rank, arrival: Arrival) -> None:
        if not arrival.group:
            self._leave_device(rank, arrival)
            return
        communicator, ready = rank.communicators[arrival.group], rank.starts[arrival.index]
        collective = communicator.pending.get(arrival.ordinal)
        if collective is None:
            collective = communicator.pending[arrival.ordinal] = _Collective(arrival.signature)
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

    def _start(self, communicator: _Communicator) -> None:
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
        self, rings: RingsAtWork, communicator: _Communicator, collective: _Collective,
        rank: _Rank, arrival: Arrival,
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

    def _end(self, collective: _Collective, begin: int, end: int) -> None:
        """Resume its members, in the order of their arrivals."""
        for rank, arrival in collective.arrived:
            self._resume(rank, arrival, begin, end)

    def _resume(self, rank: _Rank, arrival: Arrival, begin: int, end: int) -> None:
        """Let `rank` go on after its collective."""
        index = arrival.index
        rank.starts[index], rank.ends[index] = begin, end
        segment = rank.frontier.get(arrival.stream)
        self._advance(rank, segment or rank.schedule.resume(rank.frontier, arrival.stream))


def _run_alone(
    communicators: Mapping[_Key, _Communicator], links: SharedLinks, clock: SimpyClock, key: _Key,
    alone: int, end: Callable[[], None],
) -> None:
    """Run from now on what takes `alone` with its links to itself, and call `end`."""
    if usage := communicators[key].usage:
        links.begin(usage, alone, end)
    else:
        clock.after(alone, end)


_Issued = dict[tuple[int, ...], list[int]]
"""Times at which a host issued each op, by the schedule and the times of the host's events."""


def _times(rank: _Rank, known: _Issued) -> Times:
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


def _mismatch(collective: _Collective, ranks: Mapping[int, int]) -> DeadlockError:
    """The error of members that issue different collectives. The fewest are blamed; of as many,
    those that arrived last. `ranks`: the number of ranks that each simulated one stands for."""
    issued: dict[tuple[str, int, int], list[tuple[_Rank, Arrival]]] = {}
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


def _endless(
    collectives: list[tuple[int, tuple[int, ...], _Collective]], costs: CostModel
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


def _deadlock(prepared: Prepared, stuck: list[_Rank]) -> DeadlockError:
    """The error whose table has the ring of ranks that wait for one another, and how their Programs
    differ."""
    waits = [wait for rank in stuck for wait in _waits(prepared, rank)]
    table = "\n  ".join(wait_table(prepared.program, waits, stretch="steady"))
    return DeadlockError(
        where=SIMULATION,
        expected="ranks of one group to issue the same collectives in the same order",
        found=f"a deadlock of {named_ranks([rank.rank for rank in stuck])}:\n  {table}",
    )


def _waits(prepared: Prepared, rank: _Rank) -> Iterator[Wait]:
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
