"""Idle intervals of the compute stream, the collective exposed in each, and those at the ends of
the step.

It reads a rank's ops and their times; why a collective is exposed it does not know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from zsim.engine.timeline import Times
from zsim.ir.ops import COLLECTIVES, Op
from zsim.runs.figures.intervals import TimeInterval

COMPUTE_STREAM = "compute"
Moment = tuple[int, int]
"""A time and the op whose it is."""


def compute_ops(ops: Sequence[Op], times: Times) -> list[Op]:
    """Ops that keep the compute stream busy: those of its ops that take time."""
    own = (op for op in ops if op.stream == COMPUTE_STREAM and op.kind not in COLLECTIVES)
    return [op for op in own if times.ends[op.index] > times.starts[op.index]]


def idle_intervals(ops: Sequence[Op], times: Times) -> Iterator[TimeInterval]:
    """Intervals from 0 to the end of the step in which the compute stream does nothing."""
    at = 0
    for op in compute_ops(ops, times):
        if times.starts[op.index] > at:
            yield at, times.starts[op.index]
        at = max(at, times.ends[op.index])
    last = max(times.ends, default=0)
    if last > at:
        yield at, last


def exposed_intervals(ops: Sequence[Op], times: Times) -> Iterator[TimeInterval]:
    """Intervals of those in which some collective runs, in order."""
    moving: list[TimeInterval] = []
    for start, end in sorted(
        (times.starts[op.index], times.ends[op.index]) for op in ops if op.kind in COLLECTIVES
    ):
        if moving and start <= moving[-1][1]:
            moving[-1] = moving[-1][0], max(end, moving[-1][1])
        else:
            moving.append((start, end))
    ends = [end for _, end in moving]
    for start, end in idle_intervals(ops, times):
        for since, until in moving[bisect_left(ends, start + 1) :]:
            if since >= end:
                break
            yield max(start, since), min(end, until)


def shares_of(
    ops: Sequence[Op], times: Times, idle: Sequence[TimeInterval]
) -> Iterator[tuple[Op, int]]:
    """Each collective with the idle time that it covers; of several at once, the last to end has
    it."""
    shares = Counter[int]()
    for _, index, ns in _pieces(ops, times, idle):
        shares[index] += ns
    for index, ns in shares.items():
        yield ops[index], ns


def _pieces(
    ops: Sequence[Op], times: Times, idle: Sequence[TimeInterval]
) -> Iterator[tuple[TimeInterval, int, int]]:
    """Idle intervals, and which collective has how much of them."""
    coming = deque(
        sorted(
            (times.starts[op.index], times.ends[op.index], op.index)
            for op in ops
            if op.kind in COLLECTIVES
        )
    )
    near: list[tuple[int, int, int]] = []
    for start, end in idle:
        while coming and coming[0][0] < end:
            near.append(coming.popleft())
        near = [span for span in near if span[1] > start]
        edges = sorted({start, end, *(t for span in near for t in span[:2] if start < t < end)})
        for left, right in pairwise(edges):
            running = [
                (until, index) for since, until, index in near if since <= left and until >= right
            ]
            if running:
                yield (start, end), max(running)[1], right - left


def at_ends(
    ops: Sequence[Op], times: Times, idle: Sequence[TimeInterval], *,
    later_than: Sequence[Iterable[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """Exposed nanoseconds of each collective before the first op of forward, and after the last op
    of a backward that it depends on.

    `later_than` has by op those that it comes after on its stream and communicator, besides what it
    waits for. The end of a backward lasts until the next micro-batch's forward, and the last one's
    until the step is over.
    """
    compute = compute_ops(ops, times)
    starts = _of_micro_batches(
        min,
        (
            (op.micro_batch, times.starts[op.index], op.index)
            for op in compute
            if op.kind == "forward"
        ),
    )
    lasts = _of_micro_batches(
        max,
        (
            (op.micro_batch, times.ends[op.index], op.index)
            for op in compute
            if op.kind == "backward"
        ),
    )
    first = min((start for start, _ in starts.values()), default=0)
    behind: dict[TimeInterval, set[int]] = {}
    over = max(times.ends, default=0), len(ops)
    for micro_batch, (end, last) in lasts.items():
        until, following = starts.get(micro_batch + 1, over)
        intervals = idle[bisect_left(idle, (end,)) : bisect_left(idle, (until,))]
        behind |= dict.fromkeys(intervals, _behind(last, ops[last + 1 : following], later_than))
    before, after = Counter[int](), Counter[int]()
    for span, index, ns in _pieces(ops, times, idle):
        if span[1] <= first:
            before[index] += ns
        elif index in behind.get(span, ()):
            after[index] += ns
    return before, after


def _of_micro_batches(
    best: Callable[..., Moment], moments: Iterable[tuple[int, int, int]]
) -> dict[int, Moment]:
    """The first or last moment of each micro-batch, with its op."""
    chosen: dict[int, Moment] = {}
    for micro_batch, moment, index in moments:
        chosen[micro_batch] = best(chosen.get(micro_batch, (moment, index)), (moment, index))
    return chosen


def _behind(index: int, ops: Sequence[Op], later_than: Sequence[Iterable[int]]) -> set[int]:
    """The `ops` after op `index` that cannot begin before it has ended, however long each takes."""
    behind = {index}
    for op in ops:
        if not behind.isdisjoint((*op.waits, *later_than[op.index])):
            behind.add(op.index)
    return behind
