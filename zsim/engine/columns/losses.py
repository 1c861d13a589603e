"""Losses to overlap by columns: as of `zsim.engine.contention.overlap`, for all ranks of a block.

The pairs of ops that run beside one another are looked for by the earliest start and the last end
on any rank. What each rank loses follows from its own times. Floats are added in the same order as
rank by rank, so losses are equal to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from zsim.engine.columns.column import Column, apart, least, most, plus
from zsim.engine.columns.rounds import ColumnTimes, DistinctRanks, RankBlock
from zsim.engine.contention.overlap import COMPUTE, LARGEST_LOSS, OfAlone, OverlapCosts, speed
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
) -> list[dict[int, Column]] | None:
    """Nanoseconds that each op loses, by block and op; None where kernels of three streams may run
    at once. `share_of` gives the loss as a share of the times at hand."""
    losses = list[dict[int, Column]]()
    for block, clock in zip(ranks.blocks, clocks, strict=True):
        own = _block_losses(block, clock, groups=ranks.groups, costs=costs, share_of=share_of)
        if own is None:
            return None
        losses.append(own)
    return losses


def _block_losses(
    block: RankBlock, clock: ColumnTimes, *, groups: Mapping[str, tuple[int, ...]],
    costs: OverlapCosts, share_of: OfAlone,
) -> dict[int, Column] | None:
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
    shared = _beside_copies(computing, copies, half=share_of(0.5))
    if shared is None:
        return None
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
                for each, start, end in zip(total, *_listed(own, len(total)), strict=True)
            ])
    if costs.collective_interference:
        share = share_of(costs.collective_interference)
        for index, ns in beside.items():
            lost[index] = _scaled(ns, share)
    return lost


def _beside_copies(
    kernels: Sequence[_Interval], copies: Sequence[_Interval], *, half: float
) -> dict[int, Column] | None:
    """The ns that kernels and copies lose to one another, by op; None where copies of two streams
    run at once."""
    by_stream = sorted(copies, key=lambda each: each.op.stream)
    streams = [[*own] for _, own in groupby(by_stream, key=lambda each: each.op.stream)]
    for before, after in combinations(streams, 2):
        for own, near in _near(before, after):
            if any(most(_together(own, each)) for each in near):
                return None
    beside = dict[int, Column]()
    for stream in streams:
        for own, near in _near(kernels, stream):
            for other in near:
                ns = _together(own, other)
                for index in (own.op.index, other.op.index):
                    beside[index] = plus(ns, beside.get(index, 0))
    return {index: _scaled(ns, half) for index, ns in beside.items()}


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
    if isinstance(other.start, int) and isinstance(other.end, int):
        begin, until = other.start, other.end
        return [
            ns if (
                ns := (end if end < until else until) - (start if start > begin else begin)
            ) > 0 else 0
            for start, end in zip(*_listed(own, size), strict=True)
        ]
    return [
        ns if (
            ns := (end if end < until else until) - (start if start > begin else begin)
        ) > 0 else 0
        for start, end, begin, until in zip(
            *_listed(own, size), *_listed(other, size), strict=True
        )
    ]


def _listed(interval: _Interval, size: int) -> tuple[list[int], list[int]]:
    """The starts and the ends on so many ranks."""
    start, end = interval.start, interval.end
    return (
        [start] * size if isinstance(start, int) else start,
        [end] * size if isinstance(end, int) else end,
    )


def _scaled(ns: Column, share: float) -> Column:
    """`share` of the ns, rounded."""
    return round(ns * share) if isinstance(ns, int) else [round(each * share) for each in ns]


def _rounded(values: list[float]) -> Column:
    """The whole ns of these; one for all ranks where there is one."""
    return round(values[0]) if len(values) == 1 else [*map(round, values)]
