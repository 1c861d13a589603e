"""Equal micro-batches: a step of five tells of one with any number.

All micro-batches between the first and the last have the same ops. Let the device do every op of
the fourth the same time after its twin in the third, and the host be no later. The fifth then finds
what the fourth found, so much later, and so would any further one between them.

A host that gains on the device with each micro-batch finds the fifth further ahead. It may issue
what comes then as early as it likes, unless the device waits for it there. Tests simulate all and
find the same nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from zsim.engine.equal_layers import Losses
from zsim.engine.simulate_step import (
    SETTLED,
    StepCosts,
    change,
    pauses,
    steady_timeline,
)
from zsim.engine.timeline import Timeline, Times
from zsim.ir.ops import Op
from zsim.ir.program import PhaseName, Program, RankProgram

FEWEST = 5
"""Micro-batches of a step with two alike that have others before and behind them. What the first
leaves behind may still show in the second."""


class Repeated(NamedTuple):
    """A simulated step of five micro-batches, of which the fourth is done `times` more."""

    timeline: Timeline
    fourths: Mapping[int, range]
    """The ops of the fourth micro-batch, by rank program."""
    period_ns: int
    times: int

    @property
    def step_time_ns(self) -> int:
        """The time of the step with all its micro-batches."""
        return self.timeline.step_time_ns + self.times * self.period_ns

    def without_fourth(self, ops: Sequence[Op], kind: int, times: Times) -> tuple[list[Op], Times]:
        """The ops of a rank program and their times in a step without the fourth micro-batch; ops
        keep their indices."""
        fourth = self.fourths[kind]

        def earlier(clock: Sequence[int]) -> list[int]:
            return [*clock[: fourth.stop], *(ns - self.period_ns for ns in clock[fourth.stop :])]

        kept = replace(times, starts=earlier(times.starts), ends=earlier(times.ends))
        return [op for op in ops if op.index not in fourth], kept


def repeated(program: Program, *, costs: StepCosts, times: int) -> Repeated | None:
    """The step of `program`, of five micro-batches, with the fourth done `times` more.

    None where the fourth does not do as the third did: then all have to be simulated.
    """
    fourths = {kind: fourth_micro_batch(rank, "steady") for kind, rank in enumerate(program.ranks)}
    known = {kind: ops for kind, ops in fourths.items() if ops is not None}
    if len(known) < len(fourths):
        return None
    unlike = False

    def settled(before: Losses, after: Losses, timeline: Timeline) -> bool:
        """Apply the rule of `is_settled` to the step with all its micro-batches."""
        nonlocal unlike
        moved = max(
            change(before, after, kind) + times * change(before, after, kind, known[kind])
            for kind in known
        )
        period = _period_ns(program, timeline, known, costs)
        unlike = unlike or period is None
        return unlike or moved < SETTLED * (timeline.step_time_ns + times * (period or 0))

    timeline = steady_timeline(program, costs=costs, settled=settled)
    period = None if unlike else _period_ns(program, timeline, known, costs)
    if period is None:
        return None
    return Repeated(timeline=timeline, fourths=known, period_ns=period, times=times)


def fourth_micro_batch(rank: RankProgram, phase: PhaseName) -> range | None:
    """The ops of the fourth of five micro-batches, if the third has the same.

    They are the same but for the names of their buffers.
    """
    starts = [part.start for part in rank.parts(phase) if part.name == "forward"]
    if len(starts) != FEWEST:
        return None
    third, fourth, fifth = starts[2:]
    ops = rank.phase(phase)
    same = fifth - fourth == fourth - third and all(
        _are_alike(op, twin)
        for op, twin in zip(ops[third:fourth], ops[fourth:fifth], strict=True)
    )
    return range(fourth, fifth) if same else None


_HEAD = attrgetter("kind", "stream", "group", "nbytes", "root", "dtype", "driver_calls")


def _are_alike(op: Op, twin: Op) -> bool:
    return (
        _HEAD(op) == _HEAD(twin)
        and (op.kernels is twin.kernels or op.kernels == twin.kernels)
        and [op.index - wait for wait in op.waits] == [twin.index - wait for wait in twin.waits]
        # mostly the names are the same too
        and ((op.memory, op.host) == (twin.memory, twin.host) or _sizes(op) == _sizes(twin))
    )


def _sizes(op: Op) -> list[tuple[object, ...]]:
    """The allocations and frees of an op without their names."""
    return [
        (type(event), getattr(event, "kind", ""), getattr(event, "nbytes", 0))
        for event in (*op.memory, *op.host)
    ]


def _period_ns(
    program: Program, timeline: Timeline, fourths: Mapping[int, range], costs: StepCosts
) -> int | None:
    """Nanoseconds from each op of the third micro-batch to its twin of the fourth, on the device.

    None if they differ, or if the host has a part in the step time.
    """
    periods = set[int]()
    for rank, times in timeline.ranks.items():
        kind = program.assignment[rank]
        ops, fourth = program.ranks[kind].steady, fourths[kind]
        distance, hosts = len(fourth), set[int]()
        hosts.update(times.issued[op] - times.issued[op - distance] for op in fourth)
        for op in fourth:
            (hosts if ops[op].stream == "host" else periods).update(
                clock[op] - clock[op - distance] for clock in (times.starts, times.ends)
            )
        if len(periods) != 1 or max(hosts) > max(periods):
            return None
        gains = min(hosts) < max(periods)
        if gains and _device_awaits_host(ops[fourth.stop :], times, costs):
            return None
    return periods.pop()


def _device_awaits_host(ops: Sequence[Op], times: Times, costs: StepCosts) -> bool:
    """True where the device waits for the host to issue one of `ops`, until the host itself waits
    for the device."""
    later = pauses(ops, costs.execution)
    for op in ops:
        alone = costs.issue_ns(op) + later.get(op.index - 1, 0)
        if times.issued[op.index] - times.issued[op.index - 1] > alone:
            return False
        if op.stream != "host" and times.starts[op.index] <= times.issued[op.index]:
            return True
    return False
