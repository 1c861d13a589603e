"""The entry of all timing: `simulate_step` gives the start and the end of every op of a step.

Kernels and collectives that overlap slow one another down (`zsim.engine.contention.overlap`). Their
overlap follows from the times and changes them, so the step is simulated in rounds. The first has
each op at its own speed, each later one the losses of the round before, until the losses settle.
Mostly one such round is enough; FSDP1's copies beside its backward need a few.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from zsim.engine.contention.overlap import OverlapCosts, of_alone, overlap_losses
from zsim.engine.equal_layers import Layers, Losses
from zsim.engine.events.prepared import Prepared
from zsim.engine.execution import Execution
from zsim.engine.faults.fault import Fault
from zsim.engine.faults.fault_delays import fault_delays
from zsim.engine.folding import in_step_off_device
from zsim.engine.simulate import simulate_round
from zsim.engine.timeline import Delays, RingCosts, Timeline, add
from zsim.ir.ops import Op
from zsim.ir.program import Program

if TYPE_CHECKING:
    from zsim.engine.columns.column import Column
    from zsim.engine.columns.rounds import ColumnTimes

SETTLED = 0.002
"""Share of the step time. Losses that change by less move the step by less than the noise of a
measurement."""
Settled = Callable[[Losses, Losses, Timeline], bool]
ROUNDS = 16
"""Most rounds. Each changes the losses by a fraction of the change of the round before: seven
tenths where FSDP1's copies overlap much."""
TRIES = 2
"""Most times that equal layers are left out, the second time behind those in which one stream gains
on another. Of 1,001 random scenarios none that failed twice had the times of its whole step in a
third try."""
MANY = 16
"""Least rank programs of which a step is simulated by columns, where these have the same ops."""


class StepCosts(OverlapCosts, RingCosts, Protocol):
    """The cost model of a whole step; `zsim.engine.costs.op_costs.Costs` is the product's."""

    @property
    def execution(self) -> Execution:
        """The scenario's `execution` table."""
        ...

    def wake_ns(self, ops: tuple[Op, ...]) -> dict[int, int]:
        """Waits of a rank's collectives for a core, in ns, by op."""
        ...


def simulate_step(
    program: Program, *, costs: StepCosts, all_ranks: bool = False, contention: bool = True,
    faults: Sequence[Fault] = (), note_hops: bool = False,
) -> Timeline:
    """The times of the steady step in ns, with overlap losses and the trainer's pauses.

    `all_ranks` simulates every rank in place of one per class (`zsim.engine.folding`). Without
    `contention` no two collectives share a link. `faults` delay ranks; those that change `program`
    are in it already (`zsim.engine.faults`). DeadlockError where ranks wait for one another
    forever or disagree on a collective. Where the execution has rings as steps, EventsError for too
    many, and the timeline has their hops if it is to `note_hops`.
    """
    if not (all_ranks or faults or note_hops):
        return steady_timeline(program, costs=costs, contention=contention)
    prepared = prepared_step(
        program, costs=costs, all_ranks=all_ranks, contention=contention, note_hops=note_hops
    )
    return faulty_timeline(prepared, faults, costs=costs)


def faulty_timeline(
    prepared: Prepared, faults: Sequence[Fault], *, costs: StepCosts
) -> Timeline:
    """The times of the steady step of what `simulate_step` has prepared, with `faults` or without.
    """
    if is_by_columns(prepared):
        return timeline_of_many(prepared, faults, costs=costs)
    return timeline_of(prepared, costs=costs, faults=faults)


def is_by_columns(prepared: Prepared) -> bool:
    """True where `faulty_timeline` takes columns: a rank then takes a fifth of the time."""
    from zsim.engine.columns.rounds import in_columns  # start-up: few steps have many ranks

    return len(prepared.program.ranks) >= MANY and in_columns(prepared)


def steady_timeline(
    program: Program, *, costs: StepCosts, contention: bool = True, settled: Settled | None = None,
) -> Timeline:
    """The times of `simulate_step` without faults, of one rank per class; `settled` may replace
    `is_settled`."""
    settled = settled or is_settled
    return timeline_of_few(
        program, costs=costs, contention=contention, settled=settled
    ) or timeline_of(
        prepared_step(program, costs=costs, contention=contention), costs=costs, settled=settled
    )


def timeline_of_few(
    program: Program, *, costs: StepCosts, contention: bool, settled: Settled
) -> Timeline | None:
    """The times of `steady_timeline`, simulated without most of the step's equal layers; None where
    it has few, or where they need not go on as the others do."""
    if costs.execution.detail == "steps" or not in_step_off_device(program):
        return None
    later = [pauses(rank.steady, costs.execution) for rank in program.ranks]
    layers = Layers.of(program, costs=costs, later=later)
    for _ in range(TRIES):
        if layers is None:
            break
        prepared = prepared_step(layers.shorter, costs=costs, contention=contention)
        whole, last = _of_layers(layers, prepared, costs=costs, settled=settled)
        if whole is not None:
            return whole
        layers = layers.behind_gains(last)
    return None


def _of_layers(
    layers: Layers, prepared: Prepared, *, costs: StepCosts, settled: Settled
) -> tuple[Timeline | None, Timeline]:
    """The times of the whole step, or None where these need not follow from the shorter one, and
    the last times of that."""
    rounds: list[tuple[Timeline, Losses]] = []
    unlike = False

    def see(timeline: Timeline, losses: Losses) -> bool:
        nonlocal unlike
        whole, lost = layers.whole(timeline), layers.all_losses(losses)
        unlike = whole is None or lost is None
        if whole is not None and lost is not None:
            rounds.append((whole, lost))
        return not unlike

    def settled_in_all(*_: object) -> bool:
        before, after = rounds[-2], rounds[-1]
        return settled(before[1], after[1], after[0])

    last = timeline_of(prepared, costs=costs, settled=settled_in_all, see=see)
    return None if unlike else rounds[-1][0], last


def prepared_step(
    program: Program, *, costs: StepCosts, all_ranks: bool = False, contention: bool = True,
    note_hops: bool = False,
) -> Prepared:
    """The part of `simulate_step` that does not depend on faults, in the detail of the execution.
    """
    return Prepared(
        program, costs=costs, all_ranks=all_ranks, contention=contention,
        stepwise=costs if costs.execution.detail == "steps" else None, note_hops=note_hops,
    )


def is_settled(before: Losses, after: Losses, timeline: Timeline) -> bool:
    """True where losses have moved from `before` by less than matters to the step of `timeline`."""
    return max((change(before, after, kind) for kind in after), default=0) < (
        SETTLED * timeline.step_time_ns
    )


def timeline_of(
    prepared: Prepared, *, costs: StepCosts, faults: Sequence[Fault] = (),
    settled: Settled = is_settled, see: Callable[[Timeline, Losses], bool] = lambda *_: True,
) -> Timeline:
    """The times of the steady step of what `simulate_step` has prepared, by events.

    `see` is told of the times and losses of each round, which is the last where it says False.
    """
    program = prepared.program
    delays = [*delays_of(program, faults, costs=costs)]
    idle = [each.later for each in delays]
    alone = simulate_round(prepared, delays)
    losses = overlap_losses(program, alone, costs=costs, pauses=idle)
    if not see(alone, losses) or not any(losses.values()):
        return alone
    for _ in range(ROUNDS):
        timeline = simulate_round(prepared, [
            replace(known, longer=add(known.longer, losses.get(kind, {})))
            for kind, known in enumerate(delays)
        ])
        before, losses = (
            losses, overlap_losses(program, timeline, costs=costs, pauses=idle, lengthened=True),
        )
        if not see(timeline, losses) or settled(before, losses, timeline):
            break
    return timeline


def timeline_of_many(
    prepared: Prepared, faults: Sequence[Fault], *, costs: StepCosts
) -> Timeline:
    """The times of `timeline_of` by columns, for ranks that are `in_columns`."""
    from zsim.engine.columns.losses import column_losses, largest_change  # start-up: few need them
    from zsim.engine.columns.rounds import DistinctRanks

    ranks = DistinctRanks(prepared, delays_of(prepared.program, faults, costs=costs))
    losses: list[dict[int, Column]] = [{} for _ in ranks.blocks]
    clocks: list[ColumnTimes] = []
    for number in range(ROUNDS + 1):
        clocks.clear()  # of ten thousand ranks they take a gigabyte
        clocks += ranks.round(losses)
        after = column_losses(ranks, clocks, costs=costs, share_of=float if number else of_alone)
        moved = max(map(largest_change, losses, after), default=0)
        if moved < SETTLED * ranks.step_ns(clocks) if number else not moved:
            break
        losses = after
    return ranks.timeline(clocks)


def delays_of(
    program: Program, faults: Sequence[Fault], *, costs: StepCosts
) -> Iterator[Delays]:
    """The delays of each rank program: the trainer's pauses, waits for a core, and `faults`."""
    idle = {id(ops): pauses(ops, costs.execution) for ops in program.steps}
    always = {id(ops): add(idle[id(ops)], costs.wake_ns(ops)) for ops in program.steps}
    for kind, slower in zip(
        program.ranks, fault_delays(program, faults, costs=costs), strict=True
    ):
        key = id(kind.steady)
        yield Delays(add(always[key], slower.longer), idle[key], slower.start)


def pauses(ops: Sequence[Op], execution: Execution) -> dict[int, int]:
    """Pauses of the trainer in ns, by op: before the first kernels of each micro-batch, and before
    the optimizer's.

    The trainer awaits the device, then works on the host, so both are idle. The op takes as much
    longer, even where the device was idle before, and the ops behind it are issued as much later.
    """
    idle: dict[int, int] = {}
    if execution.micro_batch_overhead_ns:
        firsts = {op.micro_batch: op.index for op in reversed(ops) if op.kind == "forward"}
        idle = dict.fromkeys(firsts.values(), execution.micro_batch_overhead_ns)
    step = next((op.index for op in ops if op.kind == "optimizer"), None)
    if execution.step_overhead_ns and step is not None:
        idle[step] = idle.get(step, 0) + execution.step_overhead_ns
    return idle


def change(before: Losses, after: Losses, kind: int, ops: Container[int] | None = None) -> int:
    """The sum over `ops`, or over all, of the change of their losses on rank program `kind`, in ns.
    """
    old, new = before.get(kind, {}), after.get(kind, {})
    return sum(
        abs(new.get(op, 0) - old.get(op, 0))
        for op in old.keys() | new.keys() if ops is None or op in ops
    )
