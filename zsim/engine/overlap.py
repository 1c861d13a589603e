"""What makes ops take longer than they do alone: kernels and collectives that run beside one
another, and the trainer's pauses.

A collective takes multiprocessors and memory bandwidth from the kernels that it overlaps, and they
from it. Kernels of several streams have one device between them: side by side they take as long as
one after another. How much all these overlap follows from the times and changes them, so a step is
simulated, its overlaps are added up, and it is simulated with them once more, until they settle:
mostly at once, and in a few rounds where much runs beside one another, as FSDP1's copies beside its
backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from zsim.engine.execution import Execution
from zsim.engine.interference import Lost
from zsim.engine.simulate import Prepared
from zsim.engine.timeline import Delays, Durations, Timeline, Times
from zsim.ir.ops import COLLECTIVES, Kernel, Op
from zsim.ir.program import Program


class StepCosts(Durations, Protocol):
    """Durations that also know how the step is executed, and what kernels and collectives beside
    one another lose."""

    @property
    def execution(self) -> Execution:
        """The scenario's."""
        ...

    def lost(
        self, kernels: tuple[Kernel, ...], kind: str, nbytes: int, ranks: tuple[int, ...]
    ) -> Lost:
        """Of the time in which `kernels` run beside a collective, what they lose; nothing where it
        is switched off."""
        ...

    @property
    def collective_interference(self) -> float:
        """Of the time of kernels beside a collective, the share that it loses; 0 where it is
        switched off."""
        ...


COMPUTE = ("forward", "backward", "recompute", "optimizer", "copy")
Share = Callable[[float], float]
MOST = 0.9
"""Of its time, what an op loses at most, whatever runs beside it."""

SETTLED = 0.002
"""Of a step's time: when what is lost changes by less, another round would move the step by less
than a measurement's noise."""
ROUNDS = 16
"""Rounds at most: each changes what is lost by a fraction of what the one before did, seven tenths
where FSDP1's copies run beside much."""


def simulate_step(
    program: Program, *, costs: StepCosts, all_ranks: bool = False, contention: bool = True
) -> Timeline:
    """The times of the steady step with all that slows it down; without `contention`, no two
    collectives share a link."""
    pauses = [_pauses(rank.steady, costs.execution) for rank in program.ranks]
    prepared = Prepared(program, costs=costs, all_ranks=all_ranks, contention=contention)
    alone = prepared.simulate([Delays(one, one) for one in pauses])
    lost = interference(program, alone, costs=costs, pauses=pauses)
    if not any(lost.values()):
        return alone
    for _ in range(ROUNDS):
        timeline = prepared.simulate(
            [Delays(_sum(one, lost.get(kind, {})), one) for kind, one in enumerate(pauses)]
        )
        before, lost = (
            lost, interference(program, timeline, costs=costs, pauses=pauses, lengthened=True),
        )
        if _change(before, lost) < SETTLED * timeline.step_time_ns:
            break
    return timeline


def _pauses(ops: tuple[Op, ...], execution: Execution) -> dict[int, int]:
    """A pause before the first kernels of each micro-batch, and that of the step before the
    optimizer's.

    In it the trainer has waited for the device and does something else, so neither of them works:
    the op takes as much longer, whether the device comes to it from other work or was idle, and
    what is behind it is issued as much later.
    """
    found: dict[int, int] = {}
    if execution.micro_batch_overhead_ns:
        firsts = {op.micro_batch: op.index for op in reversed(ops) if op.kind == "forward"}
        found = dict.fromkeys(firsts.values(), execution.micro_batch_overhead_ns)
    step = next((op.index for op in ops if op.kind == "optimizer"), None)
    if execution.step_overhead_ns and step is not None:
        found[step] = found.get(step, 0) + execution.step_overhead_ns
    return found


def interference(
    program: Program, timeline: Timeline, *, costs: StepCosts,
    pauses: Sequence[Mapping[int, int]] = (), lengthened: bool = False,
) -> dict[int, dict[int, int]]:
    """Nanoseconds that each op of a rank program loses to what runs beside it on its rank.

    Kernels lose to each collective what it takes from them, collectives a share of the time of
    kernels, and kernels of several streams that run at once all but their part of the device, of
    the time that they take with these losses: `lengthened` times have those in them already. Of
    ranks that run the same program the first stands for all. In `pauses`, with which ops of each
    rank program begin, no kernel runs.
    """
    of = float if lengthened else _of_alone
    found: dict[int, dict[int, int]] = {}
    for rank, times in sorted(timeline.ranks.items()):
        kind = program.assignment[rank]
        if kind in found:
            continue
        ops = program.ranks[kind].steady
        times = _after_pauses(times, pauses[kind]) if pauses and pauses[kind] else times
        kernels = [op for op in ops if op.kind in COMPUTE and op.stream == "compute"]
        collectives = [op for op in ops if op.kind in COLLECTIVES]
        copies = [op for op in ops if op.kind == "copy" and op.stream != "compute"]
        lost = _to_collectives(
            kernels, collectives, times, program=program, rank=rank, costs=costs, of=of
        )
        if costs.collective_interference:
            lost |= _beside(
                _whole(collectives, times), _whole(kernels, times),
                share=of(costs.collective_interference),
            )
        if copies:
            lost = _sum(
                lost,
                _to_one_another(
                    [*_on_device(kernels, times, costs), *_on_device(copies, times, costs)], of=of
                ),
            )
        found[kind] = lost
    return found


def _of_alone(share: float) -> float:
    """Of the time without what is lost, where `share` is of the time with it."""
    return share / (1 - min(share, MOST))


def _change(before: Mapping[int, Mapping[int, int]], after: Mapping[int, Mapping[int, int]]) -> int:
    """Nanoseconds by which what the ops of a rank lose differs, of the rank program with the most.
    """
    differs = (
        _sum(dict(lost), {op: -ns for op, ns in before.get(kind, {}).items()})
        for kind, lost in after.items()
    )
    return max((sum(map(abs, each.values())) for each in differs), default=0)


def _after_pauses(times: Times, pauses: Mapping[int, int]) -> Times:
    """`times` in which ops begin with their kernels."""
    starts = list(times.starts)
    for index, pause in pauses.items():
        starts[index] += pause
    return replace(times, starts=starts)


def _to_collectives(
    kernels: list[Op], collectives: list[Op], times: Times, *, program: Program, rank: int,
    costs: StepCosts, of: Share,
) -> dict[int, int]:
    """By op: what its kernels lose to each collective beside it; collectives of several
    communicators take from it at once.

    One that takes longer than alone, since others use its links or kernels run beside it, moves its
    bytes as much slower.
    """
    losses: dict[tuple[int, str, int, str], Lost] = {}
    groups = {name: program.mesh.group(name, rank) for name in {op.group for op in collectives}}
    ordered = sorted(
        (times.starts[op.index], times.ends[op.index], op.index, op) for op in collectives
    )
    speeds = [
        _speed(end - start, costs.collective_ns(op.kind, op.nbytes, groups[op.group]))
        for start, end, _, op in ordered
    ]
    lost: dict[int, int] = {}
    first = 0
    for start, end, index, op in sorted(
        (times.starts[op.index], times.ends[op.index], op.index, op) for op in kernels
    ):
        while first < len(ordered) and ordered[first][1] <= start:
            first += 1
        total = 0.0
        for place in range(first, len(ordered)):  # a slice would copy all that follow, for each op
            begin, over, _, other = ordered[place]
            if begin >= end:
                break
            overlap = min(end, over) - max(start, begin)
            if overlap > 0:
                key = id(op.kernels), other.kind, other.nbytes, other.group
                loses = losses.get(key)
                if loses is None:
                    loses = losses[key] = costs.lost(
                        op.kernels, other.kind, other.nbytes, groups[other.group]
                    )
                total += overlap * of(loses.at(speeds[place]))
        if total:
            lost[index] = round(min(total, of(MOST) * (end - start)))
    return lost


def _speed(taken: int, alone: int) -> float:
    """That of a collective which took so long: 1 when nothing held it up."""
    return alone / taken if taken > alone else 1.0


Span = tuple[int, int, int]
"""When an op begins and ends, and its index."""


def _whole(ops: list[Op], times: Times) -> list[Span]:
    return sorted((times.starts[op.index], times.ends[op.index], op.index) for op in ops)


def _on_device(ops: list[Op], times: Times, costs: StepCosts) -> Iterator[Span]:
    """When the kernels of `ops` that run on the device do: before a transfer to the host that is of
    the same op, or after one from it."""
    for op in ops:
        start, end = times.starts[op.index], times.ends[op.index]
        here = tuple([kernel for kernel in op.kernels if kernel.place == "device"])
        if here and len(here) < len(op.kernels):  # what is lost is lost on the device
            taken = end - start - costs.compute_ns(op.kernels) + costs.compute_ns(here)
            yield (
                (start, start + taken, op.index)
                if op.kernels[0] in here
                else (end - taken, end, op.index)
            )
        elif here:
            yield start, end, op.index


def _beside(spans: list[Span], others: list[Span], *, share: float) -> dict[int, int]:
    """By op: `share` of its span in which any of `others` runs. Both come in the order of starts,
    so that one walk is enough."""
    busy = _union([(start, end) for start, end, _ in others])
    lost: dict[int, int] = {}
    place = 0
    for start, end, index in spans:
        while place < len(busy) and busy[place][1] <= start:
            place += 1
        overlap, further = 0, place
        while further < len(busy) and busy[further][0] < end:
            overlap += min(end, busy[further][1]) - max(start, busy[further][0])
            further += 1
        if overlap:
            lost[index] = round(overlap * share)
    return lost


def _to_one_another(spans: list[Span], *, of: Share) -> dict[int, int]:
    """By op: what kernels lose that run at once, each on a stream of its own.

    Each fills the device alone, and as many as run have equal parts of it: they take as long side
    by side as one after another. FSDP1 casts and divides its gradients so, beside the backward that
    goes on (assumed: nobody has published a measurement).
    """
    edges = Counter[int]()
    for start, end, _ in spans:
        edges[start] += 1
        edges[end] -= 1
    by: dict[int, float] = {}
    running, before, total = 0, 0, 0.0
    for moment in sorted(edges):
        if running > 1:
            total += (moment - before) * of(1 - 1 / running)
        by[moment], before = total, moment
        running += edges[moment]
    return {index: lost for start, end, index in spans if (lost := round(by[end] - by[start]))}


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _sum(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    total: defaultdict[int, int] = defaultdict(int, first)
    for index, extra in second.items():
        total[index] += extra
    return dict(total)
