"""Equal layers: a step is simulated without most of them, and its times hold for all.

Ops recur with a period: that of a layer in forward, of one in backward, of several where buckets
span layers. `Layers.of` finds such runs by the ops alone, and leaves out all periods of a run but
its first and last few. In the shorter step the ops of a period, and all that they come behind, have
to be the same time after their twins. Nothing else of the step may run beside them. Then the device
goes on so in the periods left out.

A stream that gains on another with each layer does so until it waits for that one. By both periods
it is known after how many layers it has to; then as many are kept before the others.

The host need not go on so: it may gain on the device with each layer, until the launch queue is
full. And an op behind a run may wait for one before it. So the host is followed through all ops,
and each has to start when it, the op's stream and its waits let it. Else all are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import inf
from operator import mul
from typing import NamedTuple

from zsim.engine.events.rank_schedule import awaited_by_host
from zsim.engine.timeline import CostModel, Timeline, Times
from zsim.ir.ops import Op
from zsim.ir.program import Program, RankProgram, begin_alike

HEAD, TAIL = 4, 3
"""Periods of a run that are kept, before the others and behind them; more before them where streams
gain on one another. Behind them FSDP1 gathers two units ahead, so that the last two layers of a
forward lose less to gathers than others."""
DEEPEST = HEAD - 2
"""Most periods over which an op may reach back to what it waits for."""
NOWHERE = -1
WORTH = 0.4
"""Least share of the ops to leave out: below it is quicker to simulate all."""
Losses = Mapping[int, Mapping[int, int]]
"""Nanoseconds that each op loses, by rank program and op."""
_Starting = dict[bool, set[tuple[str, int, int]]]
"""Collectives, by kind, bytes and start, that a rank starts (True) or awaits (False)."""


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


@dataclass(frozen=True, slots=True)
class IssuingHost:
    """A rank's ops in the whole step, and its host: what that does and awaits before it issues
    each."""

    ops: tuple[Op, ...]
    numbers: Sequence[int]
    """Equal ones of ops that do the same, and wait for ops as far before them."""
    costs: CostModel
    later: Mapping[int, int]
    """Nanoseconds for which the host pauses behind an op."""
    issue_ns: Sequence[int] = ()
    """Nanoseconds of each op, known like `awaited` only where layers are left out."""
    awaited: Sequence[tuple[int, ...]] = ()
    runs: Sequence[Recurrence] = ()
    twins: Sequence[int] = ()
    """The op of the shorter step that each is like."""
    common: int = 0
    """The first ops, with all runs, that it has in common with the first rank program; 0 if it has
    other runs."""

    def followed(
        self, times: Times, periods: Sequence[int], starting: _Starting,
        first: tuple[Times, Times] | None,
    ) -> Times | None:
        """The times of the whole step from those of the shorter; None where an op would not be at
        that time, by the host, its stream and what it waits for.

        Collectives that this rank starts as the last, or holds up others by, are noted in
        `starting`. `first`: the times in both steps of a rank with the first program.
        """
        arrivals = [times.arrived.get(op, start) for op, start in enumerate(times.starts)]
        clocks, begin = (times.starts, times.ends, arrivals), 0
        issued, clock = list[int](), 0
        over, free = dict[str, int](), dict[str, int]()
        if first is not None and self._begins_as(times, first[0]):
            begin, known = self.common, first[1]
            late = sum(map(mul, periods, [run.left_out for run in self.runs]))
            starts, ends, ready = (
                [*whole[:begin], *[ns + late for ns in few[self._num_common :]]]
                for whole, few in zip((known.starts, known.ends, known.ends), clocks, strict=True)
            )
            for index, ns in known.arrived.items():
                ready[index] = ns if index < begin else ready[index]
            issued += known.issued[:begin]
            clock = issued[-1] + self.later.get(begin - 1, 0)
            over = {op.stream: ends[op.index] for op in self.ops[:begin]}
            free = {op.group: ends[op.index] for op in self.ops[:begin] if op.group}
        else:
            starts, ends, ready = (_spread(each, self.runs, periods) for each in clocks)
        for op, own, others in zip(
            self.ops[begin:], self.issue_ns[begin:], self.awaited[begin:], strict=True
        ):
            index, stream = op.index, op.stream
            for other in others:
                if ends[other] > clock:
                    clock = ends[other]
            clock += own
            issued.append(clock)
            at = clock
            for wait in op.waits:
                if ends[wait] > at:
                    at = ends[wait]
            if stream == "host":
                starts[index] = ends[index] = at
            else:
                at = max(at, over.get(stream, 0))
                start = starts[index]
                if at > ready[index] or at < ready[index] == start:
                    return None
                ready[index], over[stream] = at, ends[index]
                if op.group:
                    key = op.kind, op.nbytes, start
                    starting[max(at, free.get(op.group, 0)) == start].add(key)
                    free[op.group] = ends[index]
            if index in self.later:
                clock += self.later[index]
        twins = self.twins
        shared = {op: times.shared[at] for op, at in enumerate(twins) if at in times.shared}
        arrived = {op: ready[op] for op, at in enumerate(twins) if at in times.arrived}
        return Times(starts, ends, issued, shared, arrived)

    def _begins_as(self, times: Times, first: Times) -> bool:
        """True where the common ops have the `times` that the `first` rank has in the shorter step.
        """
        num = self._num_common
        return (
            num > 0 and times.starts[:num] == first.starts[:num]
            and times.ends[:num] == first.ends[:num] and times.arrived == first.arrived
        )

    @property
    def _num_common(self) -> int:
        """The number of common ops in the shorter step."""
        return self.twins[self.common - 1] + 1 if self.common else 0


class Layers(NamedTuple):
    """A step without most of its equal layers, `shorter`, and what leads back to the whole one."""

    shorter: Program
    hosts: Sequence[IssuingHost]
    """Ops and hosts of the whole step, by rank program. All have as many runs, and leave out as
    many periods of each."""

    @classmethod
    def of(
        cls, program: Program, *, costs: CostModel, later: Sequence[Mapping[int, int]]
    ) -> Layers | None:
        """The layers of `program`, or None where few ops recur, or where the device waits for the
        host's own work; `later` as `IssuingHost` has it, by rank program."""
        if any(map(_works_on_host, program.steps)):
            return None
        codes, known = dict[object, int](), dict[int, int]()
        hosts = [
            IssuingHost(rank.steady, _numbers(rank.steady, codes, known), costs, pauses)
            for rank, pauses in zip(program.ranks, later, strict=True)
        ]
        return cls._behind(program, hosts, heads=())

    @classmethod
    def _behind(
        cls, program: Program, hosts: Sequence[IssuingHost], *, heads: Sequence[int]
    ) -> Layers | None:
        """The layers with as many periods as `heads` before those left out, by run, and `HEAD` by
        default."""
        ranks, own = list[RankProgram](), list[IssuingHost]()
        for host in hosts:
            runs = _runs(host.ops, host.numbers, heads)
            ops = _shorter(host.ops, runs)
            if ops is None:
                return None
            ranks.append(RankProgram(construction=(), first=(), steady=ops))
            twins = _spread(range(len(ops)), runs, repeat(0))
            common = begin_alike(host.ops, hosts[0].ops)
            has_same = not own or (runs == own[0].runs and common >= runs[-1].end)
            own.append(replace(
                host, runs=runs, twins=twins, common=common if has_same else 0,
                issue_ns=host.issue_ns or list(map(host.costs.issue_ns, host.ops)),
                awaited=host.awaited or awaited_by_host(host.ops, host.costs.launch_queue),
            ))
        if len({tuple(run.left_out for run in host.runs) for host in own}) > 1:
            return None
        return cls(replace(program, ranks=tuple(ranks)), own)

    def whole(self, timeline: Timeline) -> Timeline | None:
        """The times of the whole step from those of the shorter; None where it may go on otherwise.
        """
        periods = [self._period_ns(timeline, run) for run in range(len(self.hosts[0].runs))]
        known = [ns for ns in periods if ns is not None]
        if len(known) < len(periods) or not self._are_alone(timeline):
            return None
        ranks: dict[int, Times] = {}
        starting: _Starting = {True: set(), False: set()}
        first: tuple[Times, Times] | None = None
        for rank, times in timeline.ranks.items():
            host = self.hosts[self.shorter.assignment[rank]]
            own = host.followed(times, known, starting, first)
            if own is None:
                return None
            ranks[rank] = own
            if host is self.hosts[0]:
                first = times, own
        if not starting[False] <= starting[True]:
            return None
        step = max((max(each.ends, default=0) for each in ranks.values()), default=0)
        return replace(timeline, ranks=ranks, step_time_ns=step)

    def behind_gains(self, timeline: Timeline) -> Layers | None:
        """The layers behind all those in which one stream gains on another, by `timeline`, the
        times of the shorter step; None where none does, or where few are left."""
        before = [run.head for run in self.hosts[0].runs]
        heads = list(before)
        for number, head in enumerate(before):
            distances = self._distances(timeline, number)
            if distances and min(distances) < (period := max(distances)):
                # by a whole period after so many, and hardly any waits for more
                heads[number] = head + -(-period // (period - min(distances)))
        return None if heads == before else self._behind(self.shorter, self.hosts, heads=heads)

    def _period_ns(self, timeline: Timeline, number: int) -> int | None:
        """The ns by which the device does each op of a run after its twin; None where that differs.
        """
        distances = self._distances(timeline, number)
        return None if distances is None or len(distances) > 1 else max(distances, default=0)

    def _distances(self, timeline: Timeline, number: int) -> set[int] | None:
        """The ns by which the device does ops of a run after their twins; None where they take
        different shares of links."""
        distances = set[int]()
        for rank, times in timeline.ranks.items():
            kind = self.shorter.assignment[rank]
            run, ops = self.hosts[kind].runs[number], self.shorter.ranks[kind].steady
            for op in range(run.cut - run.reach, run.cut + run.period):
                twin = op - run.period
                if times.shared.get(op) != times.shared.get(twin):
                    return None
                if ops[op].stream != "host":
                    distances.add(times.starts[op] - times.starts[twin])
                    distances.add(times.ends[op] - times.ends[twin])
        return distances

    def _are_alone(self, timeline: Timeline) -> bool:
        """True where the device does nothing else of the step beside the two periods of each run
        that tell of those left out.

        Reductions of the backward before may end amid those, and slow down the first of them alone.
        """
        for rank, times in timeline.ranks.items():
            kind = self.shorter.assignment[rank]
            ops = self.shorter.ranks[kind].steady
            starts = [
                inf if op.stream == "host" else start
                for op, start in zip(ops, times.starts, strict=True)
            ]
            for run in self.hosts[kind].runs:
                first, last = run.cut - run.period, run.cut + run.period
                begin, end = min(starts[first:last]), max(times.ends[first:last])
                behind = run.cut + TAIL * run.period
                if (
                    max(times.ends[: run.at], default=0) > begin
                    or min(starts[behind:], default=inf) < end
                ):
                    return False
        return True

    def all_losses(self, losses: Losses) -> Losses | None:
        """The losses of the whole step from those of the shorter; None where twins lose different
        times."""
        for kind, own in losses.items():
            for run in self.hosts[kind].runs:
                window = range(run.cut, run.cut + run.period)
                if any(own.get(op, 0) != own.get(op - run.period, 0) for op in window):
                    return None
        return {
            kind: {op: own[twin] for op, twin in enumerate(self.hosts[kind].twins) if twin in own}
            for kind, own in losses.items()
        }


def _spread(clock: Sequence[int], runs: Sequence[Recurrence], periods: Iterable[int]) -> list[int]:
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


def _numbers(
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


def _runs(
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


def _works_on_host(ops: Sequence[Op]) -> bool:
    """True where the host has work of its own, or the device waits for it."""
    by_host = {op.index for op in ops if op.stream == "host"}
    return any(
        op.kernels if op.stream == "host" else not by_host.isdisjoint(op.waits) for op in ops
    )


def _reaches(ops: Sequence[Op]) -> Iterator[int]:
    """The ops from each wait of the device to the op that waits."""
    return (op.index - wait for op in ops if op.stream != "host" for wait in op.waits)


def _shorter(ops: Sequence[Op], runs: Sequence[Recurrence]) -> tuple[Op, ...] | None:
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
