"""Overlap: the time that ops lose to whatever runs beside them on their rank.

[Note: overlap] Three losses, all measured on the times of a simulated step:

- kernels lose to a collective, which holds multiprocessors and memory bandwidth
  (`zsim.engine.costs.interference`);
- collectives lose a share of the time in which kernels run beside them;
- kernels of several streams share one device: side by side they take as long as in sequence.

Losses change the times that they are measured on; `zsim.engine.simulate_step` repeats both until
they settle. In a first round times are those of ops alone, in later rounds they contain the losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from zsim.engine.costs.interference import KernelLoss
from zsim.engine.timeline import CostModel, Timeline, Times, add
from zsim.ir.ops import COLLECTIVES, Kernel, Op
from zsim.ir.program import Program


class OverlapCosts(CostModel, Protocol):
    """A cost model that also knows the losses of kernels and collectives beside one another."""

    def kernel_loss(
        self, kernels: tuple[Kernel, ...], kind: str, nbytes: int, ranks: tuple[int, ...]
    ) -> KernelLoss:
        """The share of their time beside a collective that `kernels` lose; 0 where the scenario
        switches interference off."""
        ...

    @property
    def collective_interference(self) -> float:
        """The share of its time beside kernels that a collective loses; 0 where the scenario
        switches interference off."""
        ...


COMPUTE = ("forward", "backward", "recompute", "optimizer", "copy")
LARGEST_LOSS = 0.9
"""Share of its time: the most that an op loses to all that runs beside it. Assumed."""
OfAlone = Callable[[float], float]
"""A loss as a share of the times at hand, from its share of the lengthened time."""
_Interval = tuple[int, int, int]
"""Start and end in ns, then the index of an op, or the number of ops that run."""


def overlap_losses(
    program: Program, timeline: Timeline, *, costs: OverlapCosts,
    pauses: Sequence[Mapping[int, int]] = (), lengthened: bool = False,
) -> dict[int, dict[int, int]]:
    """Nanoseconds that each op loses to overlap, by rank program and op index.

    `lengthened`: the times of `timeline` contain losses already. `pauses`, by rank program and op:
    idle ns with which ops begin. Of ranks with one program the first stands for all.
    """
    share_of = float if lengthened else of_alone
    losses: dict[int, dict[int, int]] = {}
    for rank, times in sorted(timeline.ranks.items()):
        kind = program.assignment[rank]
        if kind in losses:
            continue
        ops = program.ranks[kind].steady
        times = _after_pauses(times, pauses[kind]) if pauses and pauses[kind] else times
        kernels = [op for op in ops if op.kind in COMPUTE and op.stream == "compute"]
        collectives = [op for op in ops if op.kind in COLLECTIVES]
        copies = [op for op in ops if op.kind == "copy" and op.stream != "compute"]
        own = _losses_to_collectives(
            ops, _intervals(kernels, times), _intervals(collectives, times),
            groups={
                name: program.mesh.group(name, rank) for name in {op.group for op in collectives}
            },
            costs=costs, share_of=share_of,
        )
        if costs.collective_interference:
            own |= _losses_to_kernels(
                _intervals(collectives, times), _intervals(kernels, times),
                share=share_of(costs.collective_interference),
            )
        if copies:
            own = add(
                own, losses_to_streams(
                    sorted(_on_device([*kernels, *copies], times, costs)), share_of=share_of
                ),
            )
        losses[kind] = own
    return losses


def of_alone(share: float) -> float:
    """The loss per time alone of an op that loses `share` of its lengthened time."""
    return share / (1 - min(share, LARGEST_LOSS))


def _after_pauses(times: Times, pauses: Mapping[int, int]) -> Times:
    """`times` in which ops begin with their kernels."""
    starts = list(times.starts)
    for index, pause in pauses.items():
        starts[index] += pause
    return replace(times, starts=starts)


def _losses_to_collectives(
    ops: Sequence[Op], kernels: list[_Interval], collectives: list[_Interval], *,
    groups: Mapping[str, tuple[int, ...]], costs: OverlapCosts, share_of: OfAlone,
) -> dict[int, int]:
    """The ns that each op's kernels lose to the collectives beside it, by op.

    Losses to several collectives at once add up. A collective that takes longer than alone, slowed
    by other collectives or by kernels, moves its bytes as much slower.
    """
    speeds = [
        speed(end - start, costs.collective_ns(op.kind, op.nbytes, groups[op.group]))
        for start, end, index in collectives
        for op in (ops[index],)
    ]
    known: dict[tuple[int, str, int, str], KernelLoss] = {}
    totals: dict[int, float] = {}
    for own, other, ns in _overlaps(kernels, collectives):
        op, beside = ops[kernels[own][2]], ops[collectives[other][2]]
        key = id(op.kernels), beside.kind, beside.nbytes, beside.group
        loss = known.get(key)
        if loss is None:
            loss = known[key] = costs.kernel_loss(
                op.kernels, beside.kind, beside.nbytes, groups[beside.group]
            )
        totals[own] = totals.get(own, 0.0) + ns * share_of(loss.at(speeds[other]))
    most = share_of(LARGEST_LOSS)
    return {
        kernels[own][2]: round(min(total, most * (kernels[own][1] - kernels[own][0])))
        for own, total in totals.items()
        if total
    }


def speed(ns: int, alone_ns: int) -> float:
    """The speed of a collective that took `ns`: 1 when nothing slowed it down."""
    return alone_ns / ns if ns > alone_ns else 1.0


def _losses_to_kernels(
    collectives: list[_Interval], kernels: list[_Interval], *, share: float
) -> dict[int, int]:
    """The ns that each collective loses, by op: `share` of its time beside any kernel."""
    totals = Counter[int]()
    for own, _, ns in _overlaps(collectives, _concurrency(kernels)):
        totals[collectives[own][2]] += ns
    return {index: round(ns * share) for index, ns in totals.items()}


def losses_to_streams(kernels: list[_Interval], *, share_of: OfAlone) -> dict[int, int]:
    """The ns that kernels lose to kernels on other streams, by op.

    Each kernel fills the device alone, and kernels that run at once have equal shares of it. FSDP1
    so casts and divides its gradients beside the backward (assumed: no published measurement).
    """
    shared = [piece for piece in _concurrency(kernels) if piece[2] > 1]
    totals: dict[int, float] = {}
    for own, other, ns in _overlaps(kernels, shared):
        index = kernels[own][2]
        totals[index] = totals.get(index, 0.0) + ns * share_of(1 - 1 / shared[other][2])
    return {index: loss for index, total in totals.items() if (loss := round(total))}


def _intervals(ops: list[Op], times: Times) -> list[_Interval]:
    """The whole time of each op, in the order of starts."""
    return sorted((times.starts[op.index], times.ends[op.index], op.index) for op in ops)


def _on_device(ops: list[Op], times: Times, costs: OverlapCosts) -> Iterator[_Interval]:
    """The time of the kernels of `ops` that run on the device.

    They run before the same op's transfer to the host, or after its transfer from the host.
    """
    for op in ops:
        start, end = times.starts[op.index], times.ends[op.index]
        here = tuple([kernel for kernel in op.kernels if kernel.location == "device"])
        if here and len(here) < len(op.kernels):  # all loss is the device's
            alone = costs.compute_ns(op.kernels) + times.shared.get(op.index, 0)
            own = end - start - alone + costs.compute_ns(here)
            yield (
                (start, start + own, op.index)
                if op.kernels[0] in here
                else (end - own, end, op.index)
            )
        elif here:
            yield start, end, op.index


def _overlaps(
    intervals: list[_Interval], others: list[_Interval]
) -> Iterator[tuple[int, int, int]]:
    """The index of an interval, that of one of `others`, and the ns of their overlap.

    Both lists are in the order of starts, so one walk is enough.
    """
    first = 0
    for index, (start, end, _) in enumerate(intervals):
        while first < len(others) and others[first][1] <= start:
            first += 1
        for other in range(first, len(others)):
            other_start, other_end, _ = others[other]
            if other_start >= end:
                break
            ns = min(end, other_end) - max(start, other_start)
            if ns > 0:
                yield index, other, ns


def _concurrency(intervals: list[_Interval]) -> list[_Interval]:
    """Intervals in which a constant number of `intervals`, at least one, runs, with that number."""
    edges = Counter[int]()
    for start, end, _ in intervals:
        edges[start] += 1
        edges[end] -= 1
    pieces: list[_Interval] = []
    running = before = 0
    for time in sorted(edges):
        if running:
            pieces.append((before, time, running))
        running, before = running + edges[time], time
    return pieces
