"""A rank program as a course that its ranks run, stretch by stretch: which times follow from which,
before there are any.

Between collectives nothing is shared: an op starts when the host has issued it, the op before it on
its stream is over, and those it waits for are. So a rank runs a stretch of ops at once, by sums and
maxima, until it has arrived at collectives, and goes on when one of them has ended. Which ops such
a stretch has depends on what has ended and not on when: it is found once for all ranks of the
program.

Moments are numbered: those of ops, at which they end, as the ops themselves; after them those of
the host, at which it goes on after it has awaited something. The first of these is the beginning of
the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.ir.launch_queue import NONE, awaited
from zsim.ir.ops import COLLECTIVES, STREAMS, Op

_HOST = STREAMS.index("host")

Step = tuple[int, int, tuple[int, ...]]
"""A moment, the moment of the host from which its issue counts, and the other moments that it comes
after."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The collective `index`, whose member this rank is, the `place`-th one of its group."""

    index: int
    stream: int
    group: str
    place: int
    what: tuple[str, int]
    """Kind and bytes, on which its members agree."""


class Standing(dict[int, "Stretch"]):
    """Where a rank can do nothing more before a collective ends: how far each stream has come, last
    of all the host.

    By stream it has the stretch that follows when the collective ends at which that stream stands,
    if that has been found.
    """

    __slots__ = ("arrived", "heads")

    def __init__(self, heads: tuple[int, ...], arrived: frozenset[int]) -> None:
        self.heads, self.arrived = heads, arrived


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a rank does at once: steps in an order in which each finds what it needs, and the
    collectives that it has arrived at by them."""

    steps: tuple[Step, ...]
    arrivals: tuple[Arrival, ...]
    then: Standing


class Course:
    """The course of one rank program, as found so far. `launch_queue`: how many kernels may be
    pending before the host waits, or 0."""

    def __init__(self, ops: tuple[Op, ...], *, launch_queue: int) -> None:
        self.ops = ops
        self.streams = [STREAMS.index(op.stream) for op in ops]
        self.queues: list[list[int]] = [[] for _ in STREAMS]
        self.places: list[int] = []
        """Of each op in its stream's queue."""
        self.wakes: list[int] = []
        """By op: the last moment at which the host had to go on before it issued the op."""
        self.steps: list[Step] = []
        self.arrivals: dict[int, Arrival] = {}
        self._standings: dict[tuple[int, ...], Standing] = {}
        self._add_ops(awaited_by_host(ops, launch_queue))

    @property
    def num_moments(self) -> int:
        """Of ops and of the host."""
        return len(self.steps)

    @property
    def groups(self) -> list[str]:
        """The groups whose collectives it arrives at, sorted."""
        return sorted({arrival.group for arrival in self.arrivals.values()})

    def _add_ops(self, awaited_by: Sequence[tuple[int, ...]]) -> None:
        counts: dict[str, int] = {}
        wake = len(self.ops)
        of_host: list[Step] = [(wake, wake, ())]
        for op, stream, others in zip(self.ops, self.streams, awaited_by, strict=True):
            if others:
                of_host.append((wake + 1, wake, others))
                wake += 1
            step = (op.index, wake, self._after(op, stream))
            self.steps.append(step)
            self.wakes.append(wake)
            self.places.append(len(self.queues[stream]))
            self.queues[stream].append(op.index)
            if op.kind in COLLECTIVES:
                place = counts.get(op.group, 0)
                counts[op.group] = place + 1
                self.arrivals[op.index] = Arrival(
                    op.index, stream, op.group, place, (op.kind, op.nbytes)
                )
        self.steps += of_host

    def _after(self, op: Op, stream: int) -> tuple[int, ...]:
        """The op before this one on its stream, and of what it waits for the last of each other
        stream. The host's ops keep no order."""
        queue = self.queues[stream]
        last = {} if stream == _HOST or not queue else {stream: queue[-1]}
        others = []
        for wait in op.waits:
            of = self.streams[wait]
            if of == _HOST:
                others.append(wait)
            else:
                last[of] = max(wait, last.get(of, wait))
        return (*last.values(), *others)

    def next_op(self, standing: Standing) -> Op | None:
        """The first op that is not over, or None at the end."""
        waiting = [
            queue[head]
            for queue, head in zip(self.queues, standing.heads, strict=False)
            if head < len(queue)
        ]
        return self.ops[min(waiting)] if waiting else None

    def start(self) -> Stretch:
        """The first stretch."""
        return self._stretch([0] * len(STREAMS) + [1], set())

    def go_on(self, standing: Standing, stream: int) -> Stretch:
        """The stretch from the end of the collective at which `stream` stands; from then on
        `standing` has it."""
        heads = list(standing.heads)
        heads[stream] += 1
        found = standing[stream] = self._stretch(heads, set(standing.arrived - {stream}))
        return found

    def _stretch(self, heads: list[int], arrived: set[int]) -> Stretch:
        """From `heads` on each stream as far as it gets, in turn, until none gets any further;
        `arrived` are those that stand already."""
        steps: list[Step] = []
        arrivals: list[Arrival] = []
        moved = True
        while moved:
            moved = False
            for stream, queue in enumerate(self.queues):
                while stream not in arrived and heads[stream] < len(queue):
                    index = queue[heads[stream]]
                    if not self._is_ready(index, heads, steps):
                        break
                    steps.append(self.steps[index])
                    if index in self.arrivals:
                        arrivals.append(self.arrivals[index])
                        arrived.add(stream)
                    else:
                        heads[stream] += 1
                        moved = True
        key = tuple(heads)
        then = self._standings.setdefault(key, Standing(key, frozenset(arrived)))
        return Stretch(tuple(steps), tuple(arrivals), then)

    def _is_ready(self, index: int, heads: list[int], steps: list[Step]) -> bool:
        """Whether all that `index` comes after is over; the host goes on so far as it is."""
        wake, first = self.wakes[index], len(self.ops)
        while first + heads[-1] <= wake:
            step = self.steps[first + heads[-1]]
            if not self._are_over(step[2], heads):
                return False
            steps.append(step)
            heads[-1] += 1
        return self._are_over(self.steps[index][2], heads)

    def _are_over(self, ops: tuple[int, ...], heads: list[int]) -> bool:
        places, streams = self.places, self.streams
        for index in ops:  # noqa: SIM110
            if places[index] >= heads[streams[index]]:
                return False
        return True


def awaited_by_host(ops: Sequence[Op], launch_queue: int) -> list[tuple[int, ...]]:
    """By op: those whose end the host awaits before it issues this one: a host op with waits before
    it, and a full launch queue."""
    found: list[tuple[int, ...]] = []
    waits: tuple[int, ...] = ()
    for op, room in zip(ops, awaited(ops, launch_queue=launch_queue), strict=True):
        found.append(waits if room == NONE else (*waits, room))
        waits = (op.index,) if op.stream == "host" and op.waits else ()
    return found
