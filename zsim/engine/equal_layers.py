"""Equal layers: a step is simulated without most of them, and its times hold for all.

`zsim.engine.recurring_ops` finds runs of ops that recur, and leaves out all periods of a run but
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import inf
from operator import mul
from typing import NamedTuple

from zsim.engine.events.rank_schedule import awaited_by_host
from zsim.engine.recurring_ops import TAIL, Recurrence, numbers_of, runs_of, shorter_ops, spread
from zsim.engine.timeline import CostModel, Timeline, Times
from zsim.ir.ops import Op
from zsim.ir.program import Program, RankProgram, begin_alike

Losses = Mapping[int, Mapping[int, int]]
"""Nanoseconds that each op loses, by rank program and op."""
_Starting = dict[bool, set[tuple[str, int, int]]]
"""Collectives, by kind, bytes and start, that a rank starts (True) or awaits (False)."""


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
            starts, ends, ready = (spread(each, self.runs, periods) for each in clocks)
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
            IssuingHost(rank.steady, numbers_of(rank.steady, codes, known), costs, pauses)
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
            runs = runs_of(host.ops, host.numbers, heads)
            ops = shorter_ops(host.ops, runs)
            if ops is None:
                return None
            ranks.append(RankProgram(construction=(), first=(), steady=ops))
            twins = spread(range(len(ops)), runs, repeat(0))
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


def _works_on_host(ops: Sequence[Op]) -> bool:
    """True where the host has work of its own, or the device waits for it."""
    by_host = {op.index for op in ops if op.stream == "host"}
    return any(
        op.kernels if op.stream == "host" else not by_host.isdisjoint(op.waits) for op in ops
    )
