"""Losses to overlap by columns: as of `zsim.engine.contention.overlap`, for all ranks of a block.

The pairs of ops that run beside one another are looked for by the earliest start and the last end
on any rank. What each rank loses follows from its own times. Floats are added in the same order as
rank by rank, so losses are equal to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from zsim.engine.columns.column import Column, apart, least, listed, most, plus, row
from zsim.engine.columns.rounds import ColumnTimes, DistinctRanks, RankBlock
from zsim.engine.contention.overlap import (
    COMPUTE,
    LARGEST_LOSS,
    OfAlone,
    OverlapCosts,
    losses_to_streams,
    speed,
)
from zsim.ir.ops import COLLECTIVES, Op


@dataclass(frozen=True, slots=True)
class _Interval:
    """The time of an op on each rank, and the earliest start and last end on any."""

    op: Op
    start: Column
    end: Column
    first: int
    last: int


def column_losses(
    ranks: DistinctRanks, clocks: Sequence[ColumnTimes], *, costs: OverlapCosts, share_of: OfAlone
) -> list[dict[int, Column]]:
    """Nanoseconds that each op loses, by block and op; `share_of` gives the loss as a share of the
    times at hand."""
    return [
        _block_losses(block, clock, groups=ranks.groups, costs=costs, share_of=share_of)
        for block, clock in zip(ranks.blocks, clocks, strict=True)
    ]


def _block_losses(
    block: RankBlock, clock: ColumnTimes, *, groups: Mapping[str, tuple[int, ...]],
    costs: OverlapCosts, share_of: OfAlone,
) -> dict[int, Column]:
    def interval(op: Op) -> _Interval:
        start = plus(clock.starts[op.index], block.pauses.get(op.index, 0))
        end = clock.ends[op.index]
        return _Interval(op, start, end, least(start), most(end))

    ops = block.schedule.ops
    kernels = [interval(op) for op in ops if op.kind in COMPUTE and op.stream == "compute"]
    collectives = sorted(
        (interval(op) for op in ops if op.kind in COLLECTIVES),
        key=lambda each: (each.first, each.last, each.op.index),
    )
    copies = [
        interval(op) for op in ops
        if op.kind == "copy" and op.stream != "compute" and op.kernels
    ]
    lost = _beside_collectives(
        kernels, collectives, groups=groups, costs=costs, share_of=share_of
    )
    computing = [each for each in kernels if each.op.kernels]
    shared = _beside_copies(computing, copies, size=block.size, share_of=share_of)
    for index, column in shared.items():
        lost[index] = plus(column, lost.get(index, 0))
    return lost


def largest_change(before: Mapping[int, Column], after: Mapping[int, Column]) -> int:
    """The sum over ops of the change of their losses, in ns, on the rank where it is most."""
    moved: Column = 0
    for index in before.keys() | after.keys():
        moved = plus(moved, apart(before.get(index, 0), after.get(index, 0)))
    return most(moved)


def _beside_collectives(
    kernels: Sequence[_Interval], collectives: Sequence[_Interval], *,
    groups: Mapping[str, tuple[int, ...]], costs: OverlapCosts, share_of: OfAlone,
) -> dict[int, Column]:
    """The ns that kernels lose to collectives, and collectives to kernels, by op."""
    speeds = {
        each.op.index: speed(
            each.last - each.first,
            costs.collective_ns(each.op.kind, each.op.nbytes, groups[each.op.group]),
        )
        for each in collectives
    }
    lost = dict[int, Column]()
    beside = dict[int, Column]()
    largest = share_of(LARGEST_LOSS)
    for own, near in _near(kernels, collectives):
        total: list[float] | None = None
        for other in near:
            ns, op = _together(own, other), other.op
            beside[op.index] = plus(ns, beside.get(op.index, 0))
            loss = costs.kernel_loss(own.op.kernels, op.kind, op.nbytes, groups[op.group])
            share, times = share_of(loss.at(speeds[op.index])), [ns] if isinstance(ns, int) else ns
            total = (
                [each * share for each in times] if total is None
                else [before + each * share for before, each in zip(total, times, strict=True)]
            )
        if total is not None and any(total):
            lost[own.op.index] = _rounded([
                each if each < (cap := largest * (end - start)) else cap
                for each, start, end in zip(
                    total, listed(own.start, len(total)), listed(own.end, len(total)), strict=True
                )
            ])
    if costs.collective_interference:
        share = share_of(costs.collective_interference)
        for index, ns in beside.items():
            lost[index] = _scaled(ns, share)
    return lost


def _beside_copies(
    kernels: Sequence[_Interval], copies: Sequence[_Interval], *, size: int, share_of: OfAlone
) -> dict[int, Column]:
    """The ns that kernels and copies lose to one another, by op, on `size` ranks.

    Two at once have half of the device each. Ranks with copies on two streams at once may have
    three, and are looked at one by one.
    """
    by_stream = sorted(copies, key=lambda each: each.op.stream)
    streams = [[*own] for _, own in groupby(by_stream, key=lambda each: each.op.stream)]
    crowded = set[int]()
    for before, after in combinations(streams, 2):
        for own, near in _near(before, after):
            for other in near:
                times = listed(_together(own, other), size)
                crowded.update(position for position, ns in enumerate(times) if ns)
    beside = dict[int, Column]()
    for stream in streams:
        for own, near in _near(kernels, stream):
            for other in near:
                together = _together(own, other)
                for index in (own.op.index, other.op.index):
                    beside[index] = plus(together, beside.get(index, 0))
    lost = {index: _scaled(ns, share_of(0.5)) for index, ns in beside.items()}
    if crowded:
        _look_at(crowded, [*kernels, *copies], lost, size=size, share_of=share_of)
    return lost


def _look_at(
    crowded: Iterable[int], intervals: Sequence[_Interval], lost: dict[int, Column], *, size: int,
    share_of: OfAlone,
) -> None:
    """Correct what the ranks in these positions have `lost`."""
    starts, ends = [each.start for each in intervals], [each.end for each in intervals]
    columns = {
        each.op.index: [*listed(lost.get(each.op.index, 0), size)] for each in intervals
    }
    for position in crowded:
        times = zip(row(starts, position), row(ends, position), columns, strict=True)
        own = losses_to_streams(sorted(times), share_of=share_of)
        for index, column in columns.items():
            column[position] = own.get(index, 0)
    lost |= columns


def _near(
    intervals: Sequence[_Interval], others: Sequence[_Interval]
) -> Iterator[tuple[_Interval, list[_Interval]]]:
    """Each interval that may run beside some of `others` on any rank, with these.

    Both have their first starts in order, so one walk is enough.
    """
    begin = 0
    for own in intervals:
        while begin < len(others) and others[begin].last <= own.first:
            begin += 1
        near = list[_Interval]()
        for other in others[begin:]:
            if other.first >= own.last:
                break
            near.append(other)
        if near:
            yield own, near


def _together(own: _Interval, other: _Interval) -> Column:
    """The ns in which both run."""
    columns = own.start, own.end, other.start, other.end
    size = max(len(column) if isinstance(column, list) else 0 for column in columns)
    if not size:
        return max(0, min(own.last, other.last) - max(own.first, other.first))
    starts, ends = listed(own.start, size), listed(own.end, size)
    if isinstance(other.start, int) and isinstance(other.end, int):
        begin, until = other.start, other.end
        return [
            ns if (
                ns := (end if end < until else until) - (start if start > begin else begin)
            ) > 0 else 0
            for start, end in zip(starts, ends, strict=True)
        ]
    begins, untils = listed(other.start, size), listed(other.end, size)
    return [
        ns if (
            ns := (end if end < until else until) - (start if start > begin else begin)
        ) > 0 else 0
        for start, end, begin, until in zip(starts, ends, begins, untils, strict=True)
    ]


def _scaled(ns: Column, share: float) -> Column:
    """`share` of the ns, rounded."""
    return round(ns * share) if isinstance(ns, int) else [round(each * share) for each in ns]


def _rounded(values: list[float]) -> Column:
    """The whole ns of these; one for all ranks where there is one."""
    return round(values[0]) if len(values) == 1 else [*map(round, values)]
