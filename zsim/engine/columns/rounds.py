"""Rounds by columns: a step of ranks that differ in the times of their ops and in nothing else.

Where one communicator joins all ranks and shares its links with no other, a collective is at one
time for all. So the times of an op on all ranks follow from those of ops before it, by sums and
maxima. A round goes through the ops once, and each is a column of all ranks. It gives the same
nanoseconds as events, which it stands in for where ranks are many: each with its own jitter, say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zsim.engine.columns.column import Column, folded, later, most, plus, row
from zsim.engine.events.prepared import Prepared
from zsim.engine.events.progress import durations_of
from zsim.engine.events.rank_schedule import Event, RankSchedule
from zsim.engine.timeline import NEVER, Delays, Timeline, Times

Longer = Mapping[int, Column]
"""Nanoseconds that ops take longer, by op."""
_Walk = Generator[tuple[int, int], tuple[int, int], None]
"""A step of some ranks. It yields when they are ready for a collective, and what that takes longer
there; start and end of the collective are sent in."""


@dataclass(frozen=True, slots=True)
class ColumnTimes:
    """The times of a round: starts and ends by event, arrivals by collective."""

    starts: list[Column]
    ends: list[Column]
    arrived: dict[int, Column] = field(default_factory=dict)


class RankBlock:
    """The rank programs that share a schedule."""

    def __init__(
        self, schedule: RankSchedule, alone: tuple[list[int], list[int]],
        pauses: Mapping[int, int], size: int,
    ) -> None:
        """`alone` as `Prepared` has it, `pauses` as `Delays.later`; there are `size` of them."""
        own = durations_of(schedule, alone, Delays(later=pauses))
        self.schedule, self.pauses, self.size = schedule, pauses, size
        self.kinds: list[int] = []
        """Numbers of the rank programs, by position."""
        self.begin: Column = 0
        self.durations: list[Column] = [*own.durations]
        self.offsets = own.offsets

    def add(self, kind: int, delays: Delays) -> None:
        """Take in the rank program `kind`."""
        position = len(self.kinds)
        self.kinds.append(kind)
        self.begin = self._changed(self.begin, position, delays.start)
        for index, ns in delays.longer.items():
            self.durations[index] = self._changed(self.durations[index], position, ns)

    def _changed(self, column: Column, position: int, ns: int) -> list[int]:
        """The column with `ns` more in that position."""
        column = [column] * self.size if isinstance(column, int) else column
        column[position] += ns
        return column

    def fold(self) -> None:
        """Have one number where all are equal."""
        self.begin = folded(self.begin)
        self.durations = [*map(folded, self.durations)]

    def walk(self, clock: ColumnTimes, longer: Longer) -> _Walk:
        """Go through a step and note its times in `clock`."""
        schedule, starts, ends = self.schedule, clock.starts, clock.ends
        host = len(schedule.ops)
        ends[host] = self.begin
        for index, last in enumerate(schedule.host_events):
            for resumed in range(host + 1, last + 1):
                ends[resumed] = self._ready(schedule.events[resumed], ends)
            host = last
            ready = self._ready(schedule.events[index], ends)
            takes = self.durations[index]
            if index in longer:
                takes = plus(takes, longer[index])
            if index in schedule.arrivals:
                clock.arrived[index] = ready
                starts[index], ends[index] = yield most(ready), most(takes)
            else:
                starts[index], ends[index] = ready, plus(ready, takes)

    def _ready(self, event: Event, ends: list[Column]) -> Column:
        """The time from which on the host, and all ops before it, let an event be."""
        number, host, others = event
        ready = plus(ends[host], self.offsets[number])
        for other in others:
            ready = later(ready, ends[other])
        return ready

    def times(self, clock: ColumnTimes, position: int) -> Times:
        """The times of the rank programs in that position."""
        schedule, count = self.schedule, len(self.schedule.ops)
        ends = row(clock.ends, position)
        issued = zip(schedule.host_events, self.offsets, strict=False)
        return Times(
            row(clock.starts[:count], position), ends[:count],
            [ends[host] + offset for host, offset in issued],
            arrived=dict(zip(clock.arrived, row([*clock.arrived.values()], position), strict=True)),
        )


class Rows(Mapping[int, Times]):
    """The times of each rank, taken from columns when they are asked for."""

    def __init__(
        self, blocks: Sequence[RankBlock], clocks: Sequence[ColumnTimes], ranks: Mapping[int, int]
    ) -> None:
        """`ranks`: the rank program of each."""
        self._ranks = ranks
        self._positions = {
            kind: (block, clock, position)
            for block, clock in zip(blocks, clocks, strict=True)
            for position, kind in enumerate(block.kinds)
        }

    def __getitem__(self, rank: int) -> Times:
        block, clock, position = self._positions[self._ranks[rank]]
        return block.times(clock, position)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class DistinctRanks:
    """All simulated ranks of a step, in blocks."""

    def __init__(self, prepared: Prepared, delays: Iterable[Delays]) -> None:
        """`delays` by rank program; those of one schedule pause at the same ops."""
        self.prepared = prepared
        sizes, blocks = Counter(map(id, prepared.schedules)), dict[int, RankBlock]()
        for kind, each in enumerate(delays):
            schedule = prepared.schedules[kind]
            key = id(schedule)
            if key not in blocks:
                blocks[key] = RankBlock(schedule, prepared.alone[kind], each.later, sizes[key])
            blocks[key].add(kind, each)
        self.blocks = [*blocks.values()]
        for block in self.blocks:
            block.fold()
        self.groups = {name: group for (name, _), group in prepared.groups.items()}

    def round(self, longer: Sequence[Longer]) -> list[ColumnTimes]:
        """The times of a round in which ops take `longer`, by block."""
        clocks, walks = list[ColumnTimes](), list[_Walk]()
        for block, more in zip(self.blocks, longer, strict=True):
            count = block.schedule.num_events
            clocks.append(ColumnTimes([0] * count, [0] * count))
            walks.append(block.walk(clocks[-1], more))
        free = dict.fromkeys(self.groups, 0)
        waiting = [next(walk, None) for walk in walks]
        for arrival in self.blocks[0].schedule.arrivals.values():
            present = [each for each in waiting if each is not None]
            kind, nbytes, _ = arrival.signature
            begin = max(free[arrival.group], *(ready for ready, _ in present))
            alone = self.prepared.costs.collective_ns(kind, nbytes, self.groups[arrival.group])
            free[arrival.group] = end = begin + alone + max(more for _, more in present)
            waiting = [_sent(walk, begin, end) for walk in walks]
        return clocks

    def step_ns(self, clocks: Sequence[ColumnTimes]) -> int:
        """The end of the last op."""
        return max(
            (
                most(end)
                for block, clock in zip(self.blocks, clocks, strict=True)
                for end in clock.ends[: len(block.schedule.ops)]
            ),
            default=0,
        )

    def timeline(self, clocks: Sequence[ColumnTimes]) -> Timeline:
        """The times of a round by rank."""
        prepared = self.prepared
        kinds = {rank: prepared.assignment[rank] for rank in prepared.communicators}
        return Timeline(
            ranks=Rows(self.blocks, clocks, kinds), representatives=prepared.representatives,
            step_time_ns=self.step_ns(clocks),
        )


def _sent(walk: _Walk, begin: int, end: int) -> tuple[int, int] | None:
    """The next of a walk, after a collective from `begin` to `end`; None at the walk's end."""
    try:
        return walk.send((begin, end))
    except StopIteration:
        return None


def in_columns(prepared: Prepared) -> bool:
    """True where a round by columns has the times of one by events.

    All ranks then have the same collectives, over one communicator of each group, which shares no
    links. No collective lasts forever, and nothing leaves the device.
    """
    first, costs = prepared.schedules[0], prepared.costs
    return (
        prepared.rings is None
        and not any(prepared.usages)
        and all(len(ranks) == len(prepared.communicators) for _, ranks in prepared.groups)
        and all(
            schedule is first or schedule.arrivals == first.arrivals
            for schedule in prepared.schedules
        )
        and all(arrival.group for arrival in first.arrivals.values())
        and NEVER not in {
            costs.collective_ns(*arrival.signature[:2], group)
            for arrival in first.arrivals.values()
            for (name, _), group in prepared.groups.items() if name == arrival.group
        }
    )
