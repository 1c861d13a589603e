"""The schedule of a rank program: the events whose times follow from one another, before any time
is known.

Between collectives, and what leaves the device, ranks share nothing. An op starts when the host has
issued it, and the op before it on its stream and those it waits for are over. So a rank runs a
segment of ops at once, by sums and maxima, until it arrives at collectives. It resumes when one of
them ends. The ops of a segment depend on the collectives that have ended, not on when. So each
segment is computed once for all ranks of the program.

Events are numbered. Event i is the end of op i. The host's events follow: the start of the step,
then each resumption of the host after it has awaited ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zsim.ir.ops import COLLECTIVES, STREAMS, Op, Stream, leaves_device
from zsim.ir.order.launch_queue import NONE, awaited

_HOST = STREAMS.index("host")

Event = tuple[int, int, tuple[int, ...]]
"""An event's number, the host event from which its issue counts, and the other events before it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The rank's part in collective `index`: the collective of its group with number `ordinal`.

    Work off the device is a collective of its rank alone, without a group: it shares links too.
    """

    index: int
    stream: int
    group: str
    ordinal: int
    signature: tuple[str, int, int]
    """Kind, bytes and root, on which the members agree."""


class Frontier(dict[int, "Segment"]):
    """The progress of a rank that can only go on when a collective ends.

    Its `heads` count the ops that are over, by stream, then the host's events. The streams in
    `arrived` stand at a collective. The dict has, by such a stream, the segment after the end of
    its collective, once it is computed.
    """

    __slots__ = ("arrived", "heads")

    def __init__(self, heads: tuple[int, ...], arrived: frozenset[int]) -> None:
        self.heads, self.arrived = heads, arrived


@dataclass(frozen=True, slots=True)
class Segment:
    """Events that a rank runs at once, each after those it depends on, the collectives at which it
    then arrives, and its frontier."""

    events: tuple[Event, ...]
    arrivals: tuple[Arrival, ...]
    frontier: Frontier


class RankSchedule:
    """The schedule of one rank program, as far as it has been computed.

    `launch_queue`: most kernels that may be pending before the host waits; 0 for any number.
    """

    def __init__(self, ops: tuple[Op, ...], *, launch_queue: int) -> None:
        self.ops = ops
        self.streams = [STREAMS.index(op.stream) for op in ops]
        self.queues: list[list[int]] = [[] for _ in STREAMS]
        self.positions: list[int] = []
        """Position of each op in the queue of its stream, by op."""
        self.host_events: list[int] = []
        """The last event at which the host resumes before it issues an op, by op."""
        self.events: list[Event] = []
        self.arrivals: dict[int, Arrival] = {}
        self._frontiers: dict[tuple[int, ...], Frontier] = {}
        self._add_ops(awaited_by_host(ops, launch_queue))

    def share_segments(self, others: Iterable[RankSchedule]) -> None:
        """Have the segments of a schedule among `others` whose events follow in the same way."""
        for other in others:
            if other.events == self.events and other.arrivals == self.arrivals:
                self.arrivals, self._frontiers = other.arrivals, other._frontiers
                return

    @property
    def num_events(self) -> int:
        """The number of events of ops and of the host."""
        return len(self.events)

    @property
    def groups(self) -> list[str]:
        """The names of the groups with collectives, sorted."""
        return sorted({arrival.group for arrival in self.arrivals.values() if arrival.group})

    def _add_ops(self, awaited_by: Sequence[tuple[int, ...]]) -> None:
        counts: dict[str, int] = {}
        host_event = len(self.ops)
        of_host: list[Event] = [(host_event, host_event, ())]
        for op, stream, others in zip(self.ops, self.streams, awaited_by, strict=True):
            if others:
                of_host.append((host_event + 1, host_event, others))
                host_event += 1
            self.events.append((op.index, host_event, self._after(op, stream)))
            self.host_events.append(host_event)
            self.positions.append(len(self.queues[stream]))
            self.queues[stream].append(op.index)
            if op.kind in COLLECTIVES or leaves_device(op):
                ordinal = counts.get(op.group, 0)
                counts[op.group] = ordinal + 1
                self.arrivals[op.index] = Arrival(
                    op.index, stream, op.group, ordinal, (op.kind, op.nbytes, op.root)
                )
        self.events += of_host

    def _after(self, op: Op, stream: int) -> tuple[int, ...]:
        """The op before this one on its stream and, of its waits, the last on each other stream.
        The host's ops keep no order."""
        queue = self.queues[stream]
        last = {} if stream == _HOST or not queue else {stream: queue[-1]}
        others = []
        for wait in op.waits:
            wait_stream = self.streams[wait]
            if wait_stream == _HOST:
                others.append(wait)
            else:
                last[wait_stream] = max(wait, last.get(wait_stream, wait))
        return (*last.values(), *others)

    def next_op(self, frontier: Frontier) -> Op | None:
        """The first op that is not over, or None at the end."""
        waiting = [
            queue[head]
            for queue, head in zip(self.queues, frontier.heads, strict=False)
            if head < len(queue)
        ]
        return self.ops[min(waiting)] if waiting else None

    def start(self) -> Segment:
        """The first segment."""
        return self._segment([0] * len(STREAMS) + [1], set())

    def resume(self, frontier: Frontier, stream: int) -> Segment:
        """The segment after the end of the collective at which `stream` stands; stored in
        `frontier`."""
        heads = list(frontier.heads)
        heads[stream] += 1
        segment = frontier[stream] = self._segment(heads, set(frontier.arrived - {stream}))
        return segment

    def _segment(self, heads: list[int], arrived: set[int]) -> Segment:
        """The segment from `heads`. Each stream in turn runs as far as it can, until none can.

        `arrived` are the streams that stand at a collective already.
        """
        events: list[Event] = []
        arrivals: list[Arrival] = []
        queues = [(stream, queue) for stream, queue in enumerate(self.queues) if queue]
        moved = True
        while moved:
            moved = False
            for stream, queue in queues:
                while stream not in arrived and heads[stream] < len(queue):
                    index = queue[heads[stream]]
                    if not self._is_ready(index, heads, events):
                        break
                    events.append(self.events[index])
                    if index in self.arrivals:
                        arrivals.append(self.arrivals[index])
                        arrived.add(stream)
                    else:
                        heads[stream] += 1
                        moved = True
        key = tuple(heads)
        frontier = self._frontiers.setdefault(key, Frontier(key, frozenset(arrived)))
        return Segment(tuple(events), tuple(arrivals), frontier)

    def _is_ready(self, index: int, heads: list[int], events: list[Event]) -> bool:
        """True when everything before op `index` is over; the host's events before it are run."""
        host_event, first = self.host_events[index], len(self.ops)
        while first + heads[-1] <= host_event:
            event = self.events[first + heads[-1]]
            if not self._are_over(event[2], heads):
                return False
            events.append(event)
            heads[-1] += 1
        return self._are_over(self.events[index][2], heads)

    def _are_over(self, ops: tuple[int, ...], heads: list[int]) -> bool:
        positions, streams = self.positions, self.streams
        for index in ops:  # noqa: SIM110
            if positions[index] >= heads[streams[index]]:
                return False
        return True


def awaited_by_host(ops: Sequence[Op], launch_queue: int) -> list[tuple[int, ...]]:
    """The ops whose ends the host awaits before it issues an op, by op.

    It awaits them for a host op just before that has waits or is work of the host's own, or for a
    full launch queue. Before it frees a segment it awaits the last op of every stream.
    """
    awaited_by: list[tuple[int, ...]] = []
    waits: tuple[int, ...] = ()
    last: dict[Stream, int] = {}
    for op, earlier in zip(ops, awaited(ops, launch_queue=launch_queue), strict=True):
        if op.driver_calls is not None and op.driver_calls.frees:
            waits = (*waits, *last.values())
        awaited_by.append(waits if earlier == NONE else (*waits, earlier))
        waits = (op.index,) if op.stream == "host" and (op.waits or leaves_device(op)) else ()
        last[op.stream] = op.index
    return awaited_by
