"""Memory and step time of a scenario, for whoever compares many: without a Run, and of many
micro-batches from five of them.

Where they repeat, in memory and in time, the figures are those of all micro-batches, to
the byte and the nanosecond. Where they do not, all are planned and simulated.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.engine.equal_micro_batches import FEWEST, fourth_micro_batch
from zsim.memory.allocator.full_device import with_calls
from zsim.memory.fits import MemoryVerdict, assess, assess_program
from zsim.memory.inputs_and_buffers import belongings
from zsim.runs.simulator import StepTime, step_time, step_time_of_more
from zsim.scenario.plan import Planned, planned
from zsim.scenario.scenario import Scenario

WORTH = 2
"""Fewest micro-batches beyond five for which it is worth a try."""


def figures(scenario: Scenario, *, timed: bool = True) -> tuple[MemoryVerdict, StepTime | None]:
    """The memory that a rank needs, and the step time where `timed` or where that has room."""
    return of_few(scenario, timed=timed) or of_planned(planned(scenario), timed=timed)


def of_planned(case: Planned, *, timed: bool = True) -> tuple[MemoryVerdict, StepTime | None]:
    """The figures of a scenario that is planned."""
    verdict = assess(case)
    if not timed and verdict.verdict == "OOM":
        return verdict, None
    return verdict, step_time(with_calls(case, verdict))


def of_few(
    scenario: Scenario, *, timed: bool = True
) -> tuple[MemoryVerdict, StepTime | None] | None:
    """The figures, from five micro-batches; None where there are not many more, or they do not
    repeat."""
    more = scenario.batch.accumulation - FEWEST
    if more < WORTH or scenario.faults or scenario.execution.detail == "steps":
        return None
    few = scenario.with_parts(batch=replace(scenario.batch, accumulation=FEWEST))
    case = planned(few)
    if any(fourth_micro_batch(rank, "first") is None for rank in case.program.ranks):
        return None
    verdict = assess_program(
        case.program, scenario.cluster, expandable_segments=scenario.expandable_segments,
        besides=belongings(scenario),
    )
    if not verdict.repeats or verdict.pressure is not None:
        return None
    if not timed and verdict.verdict == "OOM":
        return verdict, None
    took = step_time_of_more(with_calls(case, verdict), times=more)
    return None if took is None else (verdict, took)
