"""What makes ops take longer than they do alone: kernels and collectives that run beside one another, and the trainer's pauses.

A collective takes multiprocessors and memory bandwidth from the kernels that it overlaps, and they from it. Kernels of several streams
have one device between them: side by side they take as long as one after another. How much all these overlap follows from the times
and changes them, so a step is simulated, its overlaps are added up, and it is simulated with them once more. What the second round
overlaps more or less by then is a few per cent of a few per cent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from zsim.engine import Prepared
from zsim.execution import Execution
from zsim.ops import COLLECTIVES, Kernel, Op
from zsim.program import Program
from zsim.timeline import Delays, Durations, Timeline, Times


class StepCosts(Durations, Protocol):
    """Durations that also know how the step is executed, and what kernels and collectives beside one another lose."""

    @property
    def execution(self) -> Execution:
        """The scenario's."""
        ...

    def lost(self, kernels: tuple[Kernel, ...], kind: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        """Of the time in which `kernels` run beside a collective, the share that they lose; 0 where it is switched off."""
        ...

    @property
    def collective_interference(self) -> float:
        """Of the time of kernels beside a collective, the share that it takes longer; 0 where it is switched off."""
        ...


COMPUTE = ("forward", "backward", "recompute", "optimizer", "copy")
ONE_DEVICE = 1.0
"""Of the time in which kernels of two streams run at once, the share that each of them takes longer: both fill the device alone, and halve
it together. FSDP1 casts and divides its gradients so, beside the backward that goes on (assumed: nobody has published a measurement)."""


def simulate_step(program: Program, *, costs: StepCosts, all_ranks: bool = False) -> Timeline:
    """The times of the steady step with all that slows it down."""
    pauses = [_pauses(rank.steady, costs.execution) for rank in program.ranks]
    prepared = Prepared(program, costs=costs, all_ranks=all_ranks)
    alone = prepared.simulate([Delays(one, one) for one in pauses])
    lost = interference(program, alone, costs=costs, pauses=pauses)
    if not any(lost.values()):
        return alone
    both = [Delays(_sum(one, lost.get(kind, {})), one) for kind, one in enumerate(pauses)]
    return prepared.simulate(both)


def _pauses(ops: tuple[Op, ...], execution: Execution) -> dict[int, int]:
    """A pause before the first kernels of each micro-batch, and that of the step before the optimizer's.

    In it the trainer has waited for the device and does something else, so neither of them works: the op takes as much longer, whether the
    device comes to it from other work or was idle, and what is behind it is issued as much later.
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
    program: Program, timeline: Timeline, *, costs: StepCosts, pauses: Sequence[Mapping[int, int]] = ()
) -> dict[int, dict[int, int]]:
    """Nanoseconds that each op of a rank program loses to what runs beside it on its rank.

    Kernels lose to each collective what it takes from them, collectives a share of the time of kernels, and kernels of the compute stream
    and of others `ONE_DEVICE` of one another's. Of ranks that run the same program the first stands for all. In `pauses`, with which ops of
    each rank program begin, no kernel runs.
    """
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
        computing, others = (sorted(_on_device(some, times, costs)) for some in (kernels, copies))
        lost = _to_collectives(kernels, collectives, times, program=program, rank=rank, costs=costs)
        if costs.collective_interference:
            lost |= _beside(_whole(collectives, times), _whole(kernels, times), share=costs.collective_interference)
        if others:
            lost = _sum(_sum(lost, _beside(computing, others, share=ONE_DEVICE)), _beside(others, computing, share=ONE_DEVICE))
        found[kind] = lost
    return found


def _after_pauses(times: Times, pauses: Mapping[int, int]) -> Times:
    """`times` in which ops begin with their kernels."""
    starts = list(times.starts)
    for index, pause in pauses.items():
        starts[index] += pause
    return replace(times, starts=starts)


def _to_collectives(
    kernels: list[Op], collectives: list[Op], times: Times, *, program: Program, rank: int, costs: StepCosts
) -> dict[int, int]:
    """By op: what its kernels lose to each collective beside it; collectives of several communicators take from it at once."""
    shares: dict[tuple[int, str, int, str], float] = {}
    groups = {name: program.mesh.group(name, rank) for name in {op.group for op in collectives}}
    ordered = sorted((times.starts[op.index], times.ends[op.index], op.index, op) for op in collectives)
    lost: dict[int, int] = {}
    first = 0
    for start, end, index, op in sorted((times.starts[op.index], times.ends[op.index], op.index, op) for op in kernels):
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
                if key not in shares:
                    shares[key] = costs.lost(op.kernels, other.kind, other.nbytes, groups[other.group])
                total += overlap * shares[key]
        if total:
            lost[index] = round(total)
    return lost


Span = tuple[int, int, int]
"""When an op begins and ends, and its index."""


def _whole(ops: list[Op], times: Times) -> list[Span]:
    return sorted((times.starts[op.index], times.ends[op.index], op.index) for op in ops)


def _on_device(ops: list[Op], times: Times, costs: StepCosts) -> Iterator[Span]:
    """When the kernels of `ops` that run on the device do: before a transfer to the host that is of the same op, or after one from it."""
    for op in ops:
        start, end = times.starts[op.index], times.ends[op.index]
        here = tuple([kernel for kernel in op.kernels if kernel.place == "device"])
        if here and len(here) < len(op.kernels):
            taken = (end - start) * costs.compute_ns(here) // max(1, costs.compute_ns(op.kernels))
            yield (start, start + taken, op.index) if op.kernels[0] in here else (end - taken, end, op.index)
        elif here:
            yield start, end, op.index


def _beside(spans: list[Span], others: list[Span], *, share: float) -> dict[int, int]:
    """By op: `share` of its span in which any of `others` runs. Both come in the order of starts, so that one walk is enough."""
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
