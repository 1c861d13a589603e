"""Stamps times on a Program: host issue, streams, one queue per communicator. The only file that knows simpy.

An op starts when the host has issued it, the op before it on its stream is over, the ops it waits for are over and,
for a collective, every member has arrived and the communicator's last collective is over. Between collectives nothing
is shared, so times there follow by arithmetic at once; each collective, whose start all its members decide, is one simpy event.
A member's arrival is known at the latest at the moment of the last completion it depends on, so no event lies in the past.

Communicators that meet in a rank and together need more of its links than there is contend: while their collectives run at once,
each runs at its max–min fair share (`zsim.contention`), found anew at each start and end. Their latency is stretched as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import simpy

from zsim.contention import SharedLinks, contended
from zsim.errors import DeadlockError
from zsim.folding import Meetings, stand_ins
from zsim.ops import COLLECTIVES, STREAMS, Kernel, Op
from zsim.program import Program
from zsim.run_ahead import NONE, awaited
from zsim.sharing import Usage

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Delays:
    """Nanoseconds by op index: how much longer than their kernels ops of one rank program take, and how much later the host issues them."""

    longer: Mapping[int, int] = field(default_factory=dict)
    later: Mapping[int, int] = field(default_factory=dict)


NO_DELAYS = Delays()
_HOST = STREAMS.index("host")
FEW = 8
"""Waits of an op that are looked at anew each time; of more it is remembered how many have ended."""


class Durations(Protocol):
    """What the engine asks of a cost model; all answers are int nanoseconds."""

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        """How long these kernels run one after another."""
        ...

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """How long a collective of `nbytes` (full message) over `ranks` runs alone."""
        ...

    def usage(self, ranks: tuple[int, ...]) -> Mapping[str, Fraction]:
        """What a collective over `ranks` at full speed takes of each member's links, by their kind."""
        ...

    def issue_ns(self, op: Op) -> int:
        """How long the host takes to issue `op`."""
        ...

    @property
    def launch_queue(self) -> int:
        """How many kernels may be pending before the host waits; 0 for any number."""
        ...


@dataclass(frozen=True, slots=True)
class Times:
    """Start and end of each op of one rank, by index, and when its host had issued it.

    `shared`: by how much longer collectives took because others ran over their links meanwhile, of those that did.
    """

    starts: Sequence[int]
    ends: Sequence[int]
    issued: Sequence[int]
    shared: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The steady step in time. `ranks` holds the simulated ranks; `stand_ins` says by rank which of them it is like."""

    ranks: dict[int, Times]
    stand_ins: tuple[int, ...]
    step_time_ns: int


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A rank program as flat lists, made once for all ranks that run it."""

    ops: tuple[Op, ...]
    streams: list[int]
    durations: list[int]
    waits: list[tuple[int, ...]]
    issued: list[int]
    """When the host has issued each op, as long as it never had to wait."""
    queues: list[list[int]]
    longer: Mapping[int, int]
    """What each op takes longer than alone."""
    awaited: list[tuple[int, ...]] | None
    """By op: those whose end the host awaits before it issues this one. None where it never waits."""


@dataclass(slots=True)
class _Collective:
    """One collective of one communicator, as its members arrive."""

    kind: str
    nbytes: int
    ready: int = 0
    arrived: list[tuple[_Rank, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Communicator:
    """One queue: collectives start in issue order, each when all members have arrived and the last one is over."""

    members: int
    ranks: tuple[int, ...]
    free_at: int = 0
    next: int = 0
    pending: dict[int, _Collective] = field(default_factory=dict)
    usage: Usage = field(default_factory=dict)
    """What its collectives take of the simulated ranks' links, if it can contend; otherwise nothing."""
    waiting: list[_Collective] = field(default_factory=list)
    is_busy: bool = False


@dataclass(slots=True)
class _Rank:
    """One rank's progress: where each stream stands and what has ended when."""

    rank: int
    program: _Compiled
    communicators: dict[str, _Communicator]
    starts: list[int]
    ends: list[int]
    heads: list[int]
    free_at: list[int]
    issued: list[int]
    """When the host issued each op, as far as it is known."""
    waited: list[tuple[int, int, int]]
    """By stream, of an op that cannot start yet: how many of its waits have ended, and when the last of those did."""
    shared: dict[int, int] = field(default_factory=dict)
    """By how much longer collectives took that shared their links."""


def _compile(ops: tuple[Op, ...], durations: Durations, delays: Delays) -> _Compiled:
    clock, issued = 0, []
    queues: list[list[int]] = [[] for _ in STREAMS]
    streams = [STREAMS.index(op.stream) for op in ops]
    for op, stream in zip(ops, streams, strict=True):
        clock += durations.issue_ns(op) + delays.later.get(op.index, 0)
        issued.append(clock)
        queues[stream].append(op.index)
    durations_of = [_duration(op, durations) for op in ops]
    for index, extra in delays.longer.items():
        durations_of[index] += extra if durations_of[index] != UNKNOWN else 0
    return _Compiled(
        ops=ops,
        streams=streams,
        durations=durations_of,
        waits=[op.waits for op in ops],
        issued=issued,
        queues=queues,
        longer=delays.longer,
        awaited=_awaited_by_host(ops, durations.launch_queue),
    )


def _awaited_by_host(ops: tuple[Op, ...], launch_queue: int) -> list[tuple[int, ...]] | None:
    """A host op with waits before the next one, and a full launch queue."""
    found: list[tuple[int, ...]] = []
    waits: tuple[int, ...] = ()
    for op, room in zip(ops, awaited(ops, launch_queue=launch_queue), strict=True):
        found.append(waits if room == NONE else (*waits, room))
        waits = (op.index,) if op.stream == "host" and op.waits else ()
    return found if any(found) else None


def _duration(op: Op, durations: Durations) -> int:
    if op.kind in COLLECTIVES:
        return UNKNOWN
    return durations.compute_ns(op.kernels) if op.kernels else 0


class _Engine:
    """The state of one simulation."""

    def __init__(
        self, program: Program, durations: Durations, *, all_ranks: bool, delays: Sequence[Delays], contention: bool
    ) -> None:
        self.program, self.durations = program, durations
        self.environment = simpy.Environment()
        delays = delays or [NO_DELAYS] * len(program.ranks)
        compiled = [_compile(rank.steady, durations, own) for rank, own in zip(program.ranks, delays, strict=True)]
        everyone = tuple(range(program.mesh.world_size))
        self.stand_ins = everyone if all_ranks else stand_ins(program, duration_ns=durations.collective_ns)
        communicators: dict[tuple[str, tuple[int, ...]], _Communicator] = {}
        meetings = Meetings(program, self.stand_ins)
        self.ranks = []
        for rank in sorted(set(self.stand_ins)):
            mine = compiled[program.assignment[rank]]
            own: dict[str, _Communicator] = {}
            for axis in sorted({op.group for op in mine.ops if op.kind in COLLECTIVES}):
                group = program.mesh.group(axis, rank)
                present = group if all_ranks else meetings.present(axis, rank)
                key = (axis, present)
                own[axis] = communicators.setdefault(key, _Communicator(members=len(present), ranks=group))
            count = len(mine.ops)
            self.ranks.append(
                _Rank(
                    rank=rank,
                    program=mine,
                    communicators=own,
                    starts=[UNKNOWN] * count,
                    ends=[UNKNOWN] * count,
                    heads=[0] * len(STREAMS),
                    free_at=[0] * len(STREAMS),
                    issued=mine.issued if mine.awaited is None else [],
                    waited=[(UNKNOWN, 0, 0)] * len(STREAMS),
                )
            )
        self.places = {id(c): _sequence(c) for c in compiled}
        self.links = SharedLinks(self)
        if contention and len(communicators) > 1:
            groups = [(present, durations.usage(each.ranks)) for (_, present), each in communicators.items()]
            for each, usage in zip(communicators.values(), contended(groups), strict=True):
                each.usage = usage

    def run(self) -> Timeline:
        """Advance every rank as far as it goes, then let collectives end one by one."""
        for rank in self.ranks:
            self.advance(rank)
        self.environment.run()
        stuck = [rank for rank in self.ranks if UNKNOWN in rank.ends]
        if stuck:
            raise _deadlock(stuck)
        ends = [max(rank.ends, default=0) for rank in self.ranks]
        times = {rank.rank: Times(rank.starts, rank.ends, rank.issued, rank.shared) for rank in self.ranks}
        return Timeline(ranks=times, stand_ins=self.stand_ins, step_time_ns=max(ends, default=0))

    def advance(self, rank: _Rank) -> None:
        """Resolve every op of `rank` whose dependencies are known; collectives arrive, and block their stream."""
        program, ends, heads = rank.program, rank.ends, rank.heads
        moved = True
        while moved:
            moved = False
            for stream, queue in enumerate(program.queues):
                head = heads[stream]
                while head < len(queue):
                    index = queue[head]
                    ready = self._ready(rank, index, stream)
                    if ready == UNKNOWN:
                        break
                    duration = program.durations[index]
                    if duration == UNKNOWN:
                        if rank.starts[index] == UNKNOWN:
                            rank.starts[index] = ready
                            self._arrive(rank, index, ready)
                        break
                    rank.starts[index] = ready
                    ends[index] = rank.free_at[stream] = ready + duration
                    head += 1
                    moved = True
                heads[stream] = head

    def _ready(self, rank: _Rank, index: int, stream: int) -> int:
        """When this op, at the head of its stream, could start; UNKNOWN as long as something it needs has no end."""
        program, ends = rank.program, rank.ends
        ready = rank.issued[index] if index < len(rank.issued) else self._host_time(rank, index)
        if ready == UNKNOWN:
            return UNKNOWN
        waits = program.waits[index]
        if len(waits) < FEW:
            latest = rank.free_at[stream] if stream != _HOST else 0
            for wait in waits:
                end = ends[wait]
                if end == UNKNOWN:
                    return UNKNOWN
                latest = max(latest, end)
            return max(ready, latest)
        before, place, latest = rank.waited[stream]
        if before != index:
            place = latest = 0
        while place < len(waits):
            end = ends[waits[place]]
            if end == UNKNOWN:
                rank.waited[stream] = (index, place, latest)
                return UNKNOWN
            latest = max(latest, end)
            place += 1
        return max(ready, latest, rank.free_at[stream] if stream != _HOST else 0)

    def _host_time(self, rank: _Rank, index: int) -> int:
        """When the host issues `index`: after the op before it, and what it awaits; UNKNOWN as long as that has no end."""
        issued, program = rank.issued, rank.program
        for at in range(len(issued), index + 1):
            before = (issued[-1], program.issued[at - 1]) if at else (0, 0)
            begin = before[0]
            for wait in program.awaited[at] if program.awaited else ():
                if rank.ends[wait] == UNKNOWN:
                    return UNKNOWN
                begin = max(begin, rank.ends[wait])
            issued.append(begin + program.issued[at] - before[1])
        return issued[index] if issued else 0

    def _arrive(self, rank: _Rank, index: int, ready: int) -> None:
        op = rank.program.ops[index]
        communicator = rank.communicators[op.group]
        place = self.places[id(rank.program)][index]
        found = communicator.pending.get(place)
        if found is None:
            found = communicator.pending[place] = _Collective(op.kind, op.nbytes)
        if (found.kind, found.nbytes) != (op.kind, op.nbytes):
            raise _mismatch(rank, op, found)
        found.ready = max(found.ready, ready)
        found.arrived.append((rank, index))
        while True:
            following = communicator.pending.get(communicator.next)
            if following is None or len(following.arrived) < communicator.members:
                return
            del communicator.pending[communicator.next]
            communicator.next += 1
            self._start(communicator, following)

    def _start(self, communicator: _Communicator, collective: _Collective) -> None:
        if communicator.usage:
            communicator.waiting.append(collective)
            self._launch(communicator)
            return
        begin = max(collective.ready, communicator.free_at)
        end = begin + self._takes(communicator, collective)
        communicator.free_at = end
        event = self.environment.timeout(end - int(self.environment.now))
        event.callbacks.append(lambda _: self._end(collective, begin, end))

    def _takes(self, communicator: _Communicator, collective: _Collective) -> int:
        """Its time on links of its own; who is slowed down most by what runs beside it holds up the rest."""
        alone = self.durations.collective_ns(collective.kind, collective.nbytes, communicator.ranks)
        return alone + max(rank.program.longer.get(index, 0) for rank, index in collective.arrived)

    def _launch(self, communicator: _Communicator) -> None:
        """Let the next collective of a communicator that contends begin when it can, if none is running."""
        if communicator.is_busy or not communicator.waiting:
            return
        communicator.is_busy = True
        collective = communicator.waiting.pop(0)
        begin = max(collective.ready, communicator.free_at)
        alone = self._takes(communicator, collective)

        def ended() -> None:
            communicator.free_at, communicator.is_busy = self.now(), False
            self._launch(communicator)
            longer = communicator.free_at - begin - alone
            for rank, index in collective.arrived if longer else ():
                rank.shared[index] = longer
            self._end(collective, begin, communicator.free_at)

        if begin == self.now():
            self.links.begin(communicator.usage, alone, ended)
        else:
            self.after(begin - self.now(), lambda: self.links.begin(communicator.usage, alone, ended))

    def now(self) -> int:
        """The time of the simulation."""
        return int(self.environment.now)

    def after(self, delay: int, call: Callable[[], None]) -> None:
        """Call `call` in `delay` nanoseconds of the simulation."""
        self.environment.timeout(delay).callbacks.append(lambda _: call())

    def _end(self, collective: _Collective, begin: int, end: int) -> None:
        for rank, index in collective.arrived:
            stream = rank.program.streams[index]
            rank.starts[index], rank.ends[index] = begin, end
            rank.free_at[stream] = end
            rank.heads[stream] += 1
        for rank, _ in collective.arrived:
            self.advance(rank)


def _sequence(program: _Compiled) -> dict[int, int]:
    """The place of each collective in its communicator's queue, by op index: issue order per group."""
    counts: dict[str, int] = {}
    places = {}
    for op in program.ops:
        if op.kind in COLLECTIVES:
            places[op.index] = counts.get(op.group, 0)
            counts[op.group] = places[op.index] + 1
    return places


def _mismatch(rank: _Rank, op: Op, found: _Collective) -> DeadlockError:
    other, index = found.arrived[0]
    theirs = other.program.ops[index]
    return DeadlockError(
        where=f"rank {rank.rank}, op {op.index} ({op.kind} {op.unit})",
        expected=f"the {theirs.kind} of {theirs.nbytes:,} B that rank {other.rank} issues at op {theirs.index} over {op.group}",
        found=f"a {op.kind} of {op.nbytes:,} B",
        remedy="ranks of one group must issue the same collectives in the same order",
    )


def _deadlock(stuck: list[_Rank]) -> DeadlockError:
    """Which op each rank waits at: the first that has no end."""
    stories = []
    for rank in stuck[:8]:
        op = rank.program.ops[rank.ends.index(UNKNOWN)]
        arrived = "arrived, waits for its group" if rank.starts[op.index] != UNKNOWN else "cannot start"
        stories.append(f"rank {rank.rank} at op {op.index} ({op.kind} {op.unit} over {op.group or op.stream}: {arrived})")
    return DeadlockError(where="simulation", expected="every op to end", found="a deadlock: " + "; ".join(stories))


def simulate(
    program: Program, *, costs: Durations, all_ranks: bool = False, delays: Sequence[Delays] = (), contention: bool = True
) -> Timeline:
    """The times of the steady step. Without `all_ranks`, one rank stands for all that are alike (`zsim.folding`); without
    `contention`, every collective runs as if its links were its own.

    `delays`: those of each rank program, or nothing.
    DeadlockError when ranks wait for one another forever or disagree on a collective.
    """
    return _Engine(program, costs, all_ranks=all_ranks, delays=delays, contention=contention).run()
