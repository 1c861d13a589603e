"""Stamps times on a Program: host issue, streams, one queue per communicator. The only file that
knows simpy.

An op starts when the host has issued it, the op before it on its stream is over, the ops it waits
for are over and, for a collective, every member has arrived and the communicator's last collective
is over. Between collectives nothing is shared, so times there follow by arithmetic at once
(`zsim.engine.rank_schedule`); each collective, whose start all its members decide, is one simpy
event. A member's arrival is known at the latest at the moment of the last completion it depends on,
so no event lies in the past.

Communicators that meet in a rank and together need more of its links than there is contend: while
their collectives run at once, each runs at its max–min fair share (`zsim.engine.link_contention`),
found anew at each start and end. Their latency is stretched as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import simpy

from zsim.engine.folding import Meetings, stand_ins
from zsim.engine.link_contention import SharedLinks, contended
from zsim.engine.max_min_fairness import Usage
from zsim.engine.rank_schedule import Arrival, Course, Standing, Stretch
from zsim.engine.timeline import NO_DELAYS, Delays, Durations, Timeline, Times
from zsim.errors import DeadlockError
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program

UNKNOWN = -1
_Key = tuple[str, tuple[int, ...]]
"""A communicator: the name of its group, and those of its ranks that are simulated."""


def simulate(
    program: Program, *, costs: Durations, all_ranks: bool = False, delays: Sequence[Delays] = (),
    contention: bool = True,
) -> Timeline:
    """The times of the steady step. Without `all_ranks`, one rank stands for all that are alike
    (`zsim.engine.folding`); without `contention`, every collective runs as if its links were its
    own.

    `delays`: those of each rank program, or nothing. DeadlockError when ranks wait for one another
    forever or disagree on a collective.
    """
    return Prepared(program, costs=costs, all_ranks=all_ranks, contention=contention).simulate(
        delays
    )


class Prepared:
    """What all simulations of a Program have in common, whatever delays its ops."""

    def __init__(
        self, program: Program, *, costs: Durations, all_ranks: bool = False,
        contention: bool = True,
    ) -> None:
        """As of `simulate`."""
        self.costs, self.assignment = costs, program.assignment
        self.courses = [
            Course(rank.steady, launch_queue=costs.launch_queue) for rank in program.ranks
        ]
        self.alone = [_alone(course, costs) for course in self.courses]
        everyone = tuple(range(program.mesh.world_size))
        self.stand_ins = everyone if all_ranks else stand_ins(
            program, duration_ns=costs.collective_ns, usage=costs.usage if contention else None
        )
        self.groups: dict[_Key, tuple[int, ...]] = {}
        """The ranks of each communicator, those that are not simulated as well."""
        self.communicators: dict[int, dict[str, _Key]] = {}
        """By simulated rank and by the name of the group."""
        meetings = Meetings(program, self.stand_ins)
        names = [course.groups for course in self.courses]
        for rank in sorted(set(self.stand_ins)):
            own = self.communicators[rank] = {}
            for name in names[program.assignment[rank]]:
                group = program.mesh.group(name, rank)
                own[name] = name, group if all_ranks else meetings.present(name, rank)
                self.groups.setdefault(own[name], group)
        self.usages: list[Usage] = [{}] * len(self.groups)
        if contention and len(self.groups) > 1:
            self.usages = contended([self._usage(group) for group in self.groups.values()])

    def _usage(self, group: tuple[int, ...]) -> dict[int, Mapping[str, Fraction]]:
        """By simulated rank what collectives over `group` take of its links: as much as of those of
        the members for which it stands."""
        return {self.stand_ins[rank]: parts for rank, parts in self.costs.usage(group).items()}

    def simulate(self, delays: Sequence[Delays] = ()) -> Timeline:
        """The times of the steady step with `delays`, those of each rank program, or nothing.
        DeadlockError as `simulate`."""
        return _Engine(self, delays or [NO_DELAYS] * len(self.courses)).run()


@dataclass(frozen=True, slots=True)
class _Pace:
    """How fast a course is run, by moment."""

    durations: list[int]
    """What an op takes, if it is no collective; nothing for the host's moments."""
    offsets: list[int]
    """How long after the host's last moment an op is issued; of the host's moments, how long it has
    worked since the one before."""
    longer: Mapping[int, int]
    """What each op takes longer than alone."""


def _alone(course: Course, costs: Durations) -> tuple[list[int], list[int]]:
    """By op: what it takes, if it is no collective, and what the host takes to issue it."""
    durations = [
        costs.compute_ns(op.kernels) if op.kernels and op.kind not in COLLECTIVES else 0
        for op in course.ops
    ]
    return durations, [costs.issue_ns(op) for op in course.ops]


def _pace(course: Course, alone: tuple[list[int], list[int]], delays: Delays) -> _Pace:
    """How fast `course` is run with `delays`; `alone` are its `_alone`."""
    durations, offsets = ([0] * course.num_moments for _ in range(2))
    durations[: len(course.ops)] = alone[0]
    for index, extra in delays.longer.items():
        durations[index] += extra if index not in course.arrivals else 0
    clock, wake = 0, len(course.ops)
    for index, issue in enumerate(alone[1]):
        if course.wakes[index] != wake:
            wake = course.wakes[index]
            offsets[wake], clock = clock, 0
        clock += issue
        offsets[index] = clock
        clock += delays.later.get(index, 0)
    return _Pace(durations, offsets, delays.longer)


@dataclass(slots=True)
class _Collective:
    """One collective of one communicator, as its members arrive."""

    what: tuple[str, int]
    ready: int = 0
    last: Arrival | None = None
    """That of the member which arrived last: members that run one program have it in common."""
    longer: int = 0
    """Who is slowed down most by what runs beside it holds up the rest."""
    arrived: list[tuple[_Rank, Arrival]] = field(default_factory=list)


@dataclass(slots=True)
class _Communicator:
    """One queue: collectives start in issue order, each when all members have arrived and the last
    one is over."""

    members: int
    ranks: tuple[int, ...]
    usage: Usage
    """What its collectives take of the simulated ranks' links, if it can contend; otherwise
    nothing."""
    free_at: int = 0
    next: int = 0
    pending: dict[int, _Collective] = field(default_factory=dict)
    waiting: list[_Collective] = field(default_factory=list)
    is_busy: bool = False


@dataclass(slots=True)
class _Rank:
    """One rank's progress: how far it has come, and what has started and ended when, by moment."""

    rank: int
    course: Course
    pace: _Pace
    communicators: dict[str, _Communicator]
    starts: list[int]
    moments: list[int]
    standing: Standing
    shared: dict[int, int] = field(default_factory=dict)
    """By how much longer collectives took that shared their links."""


class _Clock:
    """The time of one simulation."""

    def __init__(self) -> None:
        self._environment = simpy.Environment()

    def now(self) -> int:
        """The present."""
        return int(self._environment.now)

    def after(self, delay: int, call: Callable[[], None]) -> None:
        """Call `call` in `delay` nanoseconds."""
        self._environment.timeout(delay).callbacks.append(lambda _: call())

    def run(self) -> None:
        """Until nothing is left to be called."""
        self._environment.run()


class _Engine:
    """The state of one simulation. Nothing that it is made of refers to it, so that all of it is
    gone once it is over."""

    def __init__(self, prepared: Prepared, delays: Sequence[Delays]) -> None:
        self.costs = prepared.costs
        self.stand_ins = prepared.stand_ins
        self.clock = _Clock()
        self.links = SharedLinks(self.clock)
        communicators = {
            key: _Communicator(members=len(key[1]), ranks=ranks, usage=usage)
            for (key, ranks), usage in zip(prepared.groups.items(), prepared.usages, strict=True)
        }
        paces = [
            _pace(*each) for each in zip(prepared.courses, prepared.alone, delays, strict=True)
        ]
        starts = [course.start() for course in prepared.courses]
        self.ranks: list[tuple[_Rank, Stretch]] = []
        for rank, keys in prepared.communicators.items():
            kind = prepared.assignment[rank]
            course = prepared.courses[kind]
            own = {name: communicators[key] for name, key in keys.items()}
            moments = [UNKNOWN] * course.num_moments
            moments[len(course.ops)] = 0
            begun = _Rank(
                rank, course, paces[kind], own, [UNKNOWN] * course.num_moments, moments,
                starts[kind].then,
            )
            self.ranks.append((begun, starts[kind]))

    def run(self) -> Timeline:
        """Advance every rank as far as it goes, then let collectives end one by one."""
        for rank, stretch in self.ranks:
            self._advance(rank, stretch)
        self.clock.run()
        stuck = [(rank, op) for rank, _ in self.ranks if (op := rank.course.next_op(rank.standing))]
        if stuck:
            raise _deadlock(stuck)
        issued: _Issued = {}
        times = {rank.rank: _times(rank, issued) for rank, _ in self.ranks}
        step = max((max(each.ends, default=0) for each in times.values()), default=0)
        return Timeline(ranks=times, stand_ins=self.stand_ins, step_time_ns=step)

    def _advance(self, rank: _Rank, stretch: Stretch) -> None:
        """Let `rank` run `stretch`. Every op of every rank passes here, so nothing is looked up
        that a local name can hold."""
        starts, moments = rank.starts, rank.moments
        durations, offsets = rank.pace.durations, rank.pace.offsets
        for moment, wake, others in stretch.steps:
            ready = moments[wake] + offsets[moment]
            for other in others:
                end = moments[other]
                if end > ready:
                    ready = end
            starts[moment] = ready
            moments[moment] = ready + durations[moment]
        rank.standing = stretch.then
        for arrival in stretch.arrivals:
            self._arrive(rank, arrival)

    def _arrive(self, rank: _Rank, arrival: Arrival) -> None:
        communicator, ready = rank.communicators[arrival.group], rank.starts[arrival.index]
        found = communicator.pending.get(arrival.place)
        if found is None:
            found = communicator.pending[arrival.place] = _Collective(arrival.what)
        if found.last is not arrival:  # of another program than the member before
            if found.what != arrival.what:
                raise _mismatch(rank, arrival, found)
            found.last, found.longer = (
                arrival, max(found.longer, rank.pace.longer.get(arrival.index, 0)),
            )
        if ready > found.ready:
            found.ready = ready
        found.arrived.append((rank, arrival))
        if len(found.arrived) < communicator.members:
            return
        following = communicator.pending.get(communicator.next)
        while following is not None and len(following.arrived) == communicator.members:
            del communicator.pending[communicator.next]
            communicator.next += 1
            self._start(communicator, following)
            following = communicator.pending.get(communicator.next)

    def _start(self, communicator: _Communicator, collective: _Collective) -> None:
        """Let a collective whose members have all arrived, the next one of its communicator, begin
        when it can."""
        if communicator.usage:
            communicator.waiting.append(collective)
            self._launch(communicator)
            return
        begin = max(collective.ready, communicator.free_at)
        end = begin + self._takes(communicator, collective)
        communicator.free_at = end
        self.clock.after(end - self.clock.now(), lambda: self._end(collective, begin, end))

    def _takes(self, communicator: _Communicator, collective: _Collective) -> int:
        """Its time on links of its own."""
        return self.costs.collective_ns(*collective.what, communicator.ranks) + collective.longer

    def _launch(self, communicator: _Communicator) -> None:
        """Let the next collective of a communicator that contends begin when it can, if none is
        running."""
        if communicator.is_busy or not communicator.waiting:
            return
        communicator.is_busy = True
        collective = communicator.waiting.pop(0)
        begin = max(collective.ready, communicator.free_at)
        alone = self._takes(communicator, collective)

        def ended() -> None:
            communicator.free_at, communicator.is_busy = self.clock.now(), False
            self._launch(communicator)
            longer = communicator.free_at - begin - alone
            for rank, arrival in collective.arrived if longer else ():
                rank.shared[arrival.index] = longer
            self._end(collective, begin, communicator.free_at)

        if begin == self.clock.now():
            self.links.begin(communicator.usage, alone, ended)
        else:
            self.clock.after(
                begin - self.clock.now(), lambda: self.links.begin(communicator.usage, alone, ended)
            )

    def _end(self, collective: _Collective, begin: int, end: int) -> None:
        """Its members go on, in the order in which they arrived."""
        for rank, arrival in collective.arrived:
            index = arrival.index
            rank.starts[index], rank.moments[index] = begin, end
            found = rank.standing.get(arrival.stream)
            self._advance(rank, found or rank.course.go_on(rank.standing, arrival.stream))


_Issued = dict[tuple[int, ...], list[int]]
"""When a host issued each op, by the course and the moments at which it went on."""


def _times(rank: _Rank, known: _Issued) -> Times:
    """Those of a rank's ops. What most hosts have in common, when they issued them, is `known` from
    the first."""
    course, count = rank.course, len(rank.course.ops)
    moments = rank.moments[count:]
    issued = known.get(key := (id(course), *moments))
    if issued is None:
        gone_on = (moments[wake - count] for wake in course.wakes)
        issued = known[key] = [
            moment + offset for moment, offset in zip(gone_on, rank.pace.offsets, strict=False)
        ]
    return Times(rank.starts[:count], rank.moments[:count], issued, rank.shared)


def _mismatch(rank: _Rank, arrival: Arrival, found: _Collective) -> DeadlockError:
    op = rank.course.ops[arrival.index]
    other, earlier = found.arrived[0]
    theirs = other.course.ops[earlier.index]
    return DeadlockError(
        where=f"rank {rank.rank}, op {op.index} ({op.kind} {op.unit})",
        expected=f"the {theirs.kind} of {theirs.nbytes:,} B that rank {other.rank} issues at op "
                 f"{theirs.index} over {op.group}",
        found=f"a {op.kind} of {op.nbytes:,} B",
        remedy="ranks of one group must issue the same collectives in the same order",
    )


def _deadlock(stuck: list[tuple[_Rank, Op]]) -> DeadlockError:
    """Which op each rank waits at: the first that has no end."""
    stories = []
    for rank, op in stuck[:8]:
        arrived = (
            "arrived, waits for its group" if rank.starts[op.index] != UNKNOWN else "cannot start"
        )
        stories.append(f"rank {rank.rank} at op {op.index} ({op.kind} {op.unit} over "
                       f"{op.group or op.stream}: {arrived})")
    return DeadlockError(
        where="simulation", expected="every op to end", found="a deadlock: " + "; ".join(stories)
    )
