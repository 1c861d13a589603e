"""The entry of steps with faults: a faulty Program and its times, or why it cannot end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zsim.engine.events.deadlock_report import SIMULATION, LostLinkError
from zsim.engine.faults.fault import AT_OPS, Fault, ReorderedCollective
from zsim.engine.faults.faulty_program import failures, faulty_program, index_of
from zsim.engine.simulate_step import StepCosts, simulate_step
from zsim.engine.timeline import Timeline
from zsim.errors import DeadlockError
from zsim.ir.order.waits import named_ranks
from zsim.ir.program import Program

UNNOTICED = "no rank notices, and its data are mixed up"
UNREACHED = "never reached: its rank has ended before"
MOST_UNFOLDED = 64
"""Ranks up to which a step that cannot end is told rank by rank."""


def simulate_faulty_step(
    program: Program, faults: Sequence[Fault], *, costs: StepCosts, all_ranks: bool = False,
    note_hops: bool = False,
) -> tuple[Program, Timeline]:
    """The Program with `faults`, and the times of its steady step, as of `simulate_step`.

    DeadlockError, with the faults, where the step cannot end or a rank fails in it; ScenarioError
    for faults at ops that are not there.
    """
    faulty = faulty_program(program, faults)
    ends = failures(program, faults)
    texts = "; ".join(_plan(program, faults, ends))
    try:
        try:
            timeline = simulate_step(
                faulty, costs=costs, all_ranks=all_ranks, faults=faults, note_hops=note_hops
            )
        except DeadlockError:
            if all_ranks or program.mesh.world_size > MOST_UNFOLDED:
                raise
            timeline = simulate_step(faulty, costs=costs, all_ranks=True, faults=faults)
    except DeadlockError as error:
        raise _blamed(error, faults, remedy=f"the scenario's faults are {texts}") from None
    for rank, index in ends.items():
        op = program.of_rank(rank).steady[index]
        raise DeadlockError(
            where=f"rank {rank}, op {index} ({op.kind} {op.unit})", expected="the rank to finish",
            found="a failure: the rank is gone before this step ends",
            remedy=f"the scenario's faults are {texts}",
        )
    return faulty, timeline


def _plan(program: Program, faults: Sequence[Fault], ends: Mapping[int, int]) -> Iterator[str]:
    """The faults as text, with those that a rank never comes to, since it has ended before."""
    for number, fault in enumerate(faults):
        late = isinstance(fault, AT_OPS) and fault.rank in ends and (
            index_of(program, fault, key=f"faults[{number}].at") > ends[fault.rank]
        )
        yield f"{fault} ({UNREACHED})" if late else str(fault)


def _blamed(error: DeadlockError, faults: Sequence[Fault], *, remedy: str) -> DeadlockError:
    """The `error` with the ranks at fault in front: those whose Programs are not as they were.

    Of two ranks that disagree the engine cannot tell which is right.
    """
    deviating = sorted({fault.rank for fault in faults if isinstance(fault, AT_OPS)})
    is_named = error.where.startswith(tuple(f"rank {rank}, " for rank in deviating))
    if isinstance(error, LostLinkError) or not deviating or is_named:
        return type(error)(
            where=error.where, expected=error.expected, found=error.found, remedy=remedy
        )
    cause = error.found if error.where == SIMULATION else f"{error.where}: {error.complaint}"
    return DeadlockError(
        where=named_ranks(deviating), expected="the ops that the Program has",
        found=f"others or none, and {cause}", remedy=remedy,
    )


def told_of(faults: Sequence[Fault]) -> tuple[str, ...]:
    """The faults of a step that has ended, as text; also that no rank notices one."""
    return tuple(
        f"{fault} ({UNNOTICED})" if isinstance(fault, ReorderedCollective) else str(fault)
        for fault in faults
    )
