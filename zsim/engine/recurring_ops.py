"""Ops of a step that recur with a period, and the step without most of those periods.

A period is that of a layer in forward, of one in backward, or of several where buckets span layers.
Runs are found by the ops alone: it knows no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zsim.ir.ops import Op

HEAD, TAIL = 4, 3
"""Periods of a run that are kept, before the others and behind them; more before them where streams
gain on one another. Behind them FSDP1 gathers two units ahead, so that the last two layers of a
forward lose less to gathers than others."""
DEEPEST = HEAD - 2
"""Most periods over which an op may reach back to what it waits for."""
NOWHERE = -1
WORTH = 0.4
"""Least share of the ops to leave out: below it is quicker to simulate all."""


class Recurrence(NamedTuple):
    """Ops from `start` on that recur after each `period` ops; `left_out` periods are not simulated,
    behind `head` that are.

    `start` counts ops of the whole step, `at` those of the shorter one. What an op comes behind, on
    its stream or by its waits, is at most `reach` ops before it.
    """

    start: int
    period: int
    head: int
    left_out: int
    at: int
    reach: int

    @property
    def gone(self) -> range:
        """The ops left out."""
        first = self.start + self.head * self.period
        return range(first, first + self.left_out * self.period)

    @property
    def end(self) -> int:
        """The first op behind the run."""
        return self.gone.stop + TAIL * self.period

    @property
    def cut(self) -> int:
        """The first op behind those left out, in the shorter step."""
        return self.at + self.head * self.period


def spread(clock: Sequence[int], runs: Sequence[Recurrence], periods: Iterable[int]) -> list[int]:
    """The times of all ops from those of the shorter step, by op."""
    whole, begin, late = list[int](), 0, 0
    for run, period_ns in zip(runs, periods, strict=False):
        whole += [ns + late for ns in clock[begin : run.cut]]
        twins = whole[-run.period :]
        for _ in range(run.left_out):
            twins = [ns + period_ns for ns in twins]
            whole += twins
        begin, late = run.cut, late + run.left_out * period_ns
    return [*whole, *(ns + late for ns in clock[begin:])]


def numbers_of(
    ops: Sequence[Op], codes: dict[object, int], known: dict[int, int]
) -> list[int]:
    """A number for each op; equal ones do the same, and wait for ops as far before them. Ops, and
    kernels, that several ops or ranks have are `known` by their ids."""
    numbers = list[int]()
    for op in ops:
        number = known.get(id(op))
        if number is None:
            kernels = known.get(id(op.kernels))
            if kernels is None:
                kernels = known[id(op.kernels)] = codes.setdefault(op.kernels, len(codes))
            waits = op.waits
            key = (
                op.kind, op.stream, op.group, op.nbytes, op.root, kernels, op.driver_calls,
                op.index - waits[0] if len(waits) == 1 else tuple([op.index - at for at in waits]),
            )
            number = known[id(op)] = codes.setdefault(key, len(codes))
        numbers.append(number)
    return numbers


def runs_of(
    ops: Sequence[Op], numbers: Sequence[int], heads: Sequence[int]
) -> list[Recurrence]:
    """The runs with periods to leave out, one behind the other."""
    following, last = [0] * len(ops), dict[int, int]()
    for index in range(len(ops) - 1, -1, -1):
        following[index] = last.get(numbers[index], index)
        last[numbers[index]] = index
    runs, index, gone = list[Recurrence](), 0, 0
    ends = dict[int, int]()  # of the latest run of each period: it has one end from wherever in it
    while index < len(ops):
        twin = following[index]
        period = twin - index
        if period and index >= ends.get(period, 0) - period:
            end = twin
            while end < len(ops) and numbers[end] == numbers[end - period]:
                end += 1
            ends[period] = end
        head = heads[len(runs)] if len(runs) < len(heads) else HEAD
        left_out = (ends[period] - index) // period - head - TAIL if period else 0
        reach = max([period, *_reaches(ops[index:twin])]) if left_out > 0 else 0
        if left_out > 0 and reach <= DEEPEST * period:
            runs.append(Recurrence(index, period, head, left_out, index - gone, reach))
            index, gone = runs[-1].end, gone + left_out * period
        else:
            index += 1
    return runs


def _reaches(ops: Sequence[Op]) -> Iterator[int]:
    """The ops from each wait of the device to the op that waits."""
    return (op.index - wait for op in ops if op.stream != "host" for wait in op.waits)


def shorter_ops(ops: Sequence[Op], runs: Sequence[Recurrence]) -> tuple[Op, ...] | None:
    """The ops without the left out ones; None if these are too few, or if other ops wait for them.

    An op waits for the last awaited op on each stream.
    """
    if sum(len(run.gone) for run in runs) < WORTH * len(ops):
        return None
    kept, places = list(ops[: runs[0].gone.start]), dict[int, int]()
    places.update((op.index, op.index) for op in kept)
    gone = 0
    for run, following in zip(runs, [*(run.gone.start for run in runs[1:]), len(ops)], strict=True):
        gone += len(run.gone)
        for op in ops[run.gone.stop : following]:
            places[op.index] = len(kept)
            if op.index < run.end:
                waits = [wait - gone for wait in op.waits]
            else:
                last = {ops[wait].stream: wait for wait in sorted(op.waits)}.values()
                waits = [places.get(wait, NOWHERE) for wait in last]
            if NOWHERE in waits:
                return None
            kept.append(_moved(op, waits, len(kept)))
    return tuple(kept)


def _moved(op: Op, waits: Sequence[int], index: int) -> Op:
    """`op` at another place, without its memory."""
    return Op(
        index, op.kind, op.unit, op.stream, tuple(waits), op.group, op.nbytes, op.root, op.dtype,
        op.micro_batch, op.reads, op.kernels, driver_calls=op.driver_calls,
    )
