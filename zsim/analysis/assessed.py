"""Memory and step time of a scenario, for whoever compares many: without a Run, and of many
micro-batches from five of them.

Where they repeat, in memory and in time, the figures are those of all micro-batches, to
the byte and the nanosecond. Where they do not, all are planned and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zsim.engine.costs.op_costs import Costs
from zsim.engine.equal_micro_batches import FEWEST, fourth_micro_batch
from zsim.ir.program import RankProgram
from zsim.memory.equal_micro_batches import micro_batches
from zsim.memory.fits import MemoryVerdict, Standing, assess_program, least_needed, standings
from zsim.memory.full_device import with_calls, without_calls
from zsim.memory.inputs_and_buffers import belongings
from zsim.runs.figures.step_time import StepTime, step_time, step_time_of_more
from zsim.scenario.derived import derived
from zsim.scenario.plan import Planned, planned
from zsim.scenario.scenario import Scenario

WORTH = 2
"""Fewest micro-batches beyond five for which it is worth a try."""
Figures = tuple[MemoryVerdict, StepTime | None]


class Floor(NamedTuple):
    """The least that a candidate needs: bytes as expected and at best, and nanoseconds of a step.
    """

    nbytes: int
    low: int
    ns: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A `scenario` planned with all its micro-batches, or with five and `more` like the fourth,
    whose bytes repeat. `ranks`: the live bytes of each rank program."""

    scenario: Scenario
    case: Planned
    ranks: Sequence[Standing]
    more: int = 0

    @property
    def floor(self) -> Floor:
        """Live bytes and the compute stream alone: all that follows takes several times as long."""
        scenario = self.scenario
        costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
        needed = least_needed(self.ranks, besides=belongings(scenario))
        ns = max(self._compute_ns(rank, costs) for rank in self.case.program.ranks)
        return Floor(needed.nbytes, needed.low, ns)

    def _compute_ns(self, rank: RankProgram, costs: Costs) -> int:
        times = [
            costs.compute_ns(op.kernels) if op.stream == "compute" else 0 for op in rank.steady
        ]
        if not self.more:
            return sum(times)
        fourth, fifth = micro_batches(rank, "steady")[3:]
        return sum(times) + self.more * sum(times[fourth:fifth])

    def step_time(self, verdict: MemoryVerdict | None = None) -> StepTime | None:
        """The time of a step, on a device with room or as the `verdict` on it has it; None where
        micro-batches do not take the same times."""
        case = without_calls(self.case) if verdict is None else with_calls(self.case, verdict)
        return step_time_of_more(case, times=self.more) if self.more else step_time(case)

    def figures(self, *, timed: bool = True, step: StepTime | None = None) -> Figures | None:
        """Needed memory of a rank, and the step time if `timed` or if the memory has room.

        None where micro-batches do not repeat. `step`: its time on a device with room.
        """
        scenario = self.scenario
        verdict = assess_program(
            self.case.program, scenario.cluster,
            expandable_segments=scenario.expandable_segments, besides=belongings(scenario),
            ranks=self.ranks,
        )
        if self.more and not verdict.repeats:
            return None
        if not timed and verdict.verdict == "OOM":
            return verdict, None
        if step is None or verdict.verdict != "FITS":
            step = self.step_time(verdict)
        return None if step is None else (verdict, step)


def figures(scenario: Scenario, *, timed: bool = True) -> Figures:
    """Needed memory of a rank, and the step time if `timed` or if the memory has room."""
    few = drafted_of_few(scenario)
    return (few and few.figures(timed=timed)) or of_planned(planned(scenario), timed=timed)


def of_planned(case: Planned, *, timed: bool = True) -> Figures:
    """The figures of a scenario that is planned."""
    known = drafted(case).figures(timed=timed)
    assert known is not None
    return known


def drafted(case: Planned) -> Drafted:
    """A planned scenario with the live bytes of its ranks."""
    return Drafted(case.scenario, case, standings(case.program, case.scenario.cluster))


def drafted_of_few(scenario: Scenario) -> Drafted | None:
    """The scenario with five micro-batches; None where there are not many more, or those differ in
    their ops or in live bytes."""
    more = scenario.batch.accumulation - FEWEST
    if more < WORTH or scenario.faults or scenario.execution.detail == "steps":
        return None
    case = planned(derived(scenario, batch=replace(scenario.batch, accumulation=FEWEST)))
    if any(fourth_micro_batch(rank, "first") is None for rank in case.program.ranks):
        return None
    few = drafted(case)
    repeats = all(each.repeats for each in few.ranks)
    return replace(few, scenario=scenario, more=more) if repeats else None


def released_ns(case: Planned, verdict: MemoryVerdict) -> int:
    """Nanoseconds by which flushing cached memory makes a steady step longer than it were on
    the same device with room for all."""
    if not verdict.releases_per_step:
        return 0
    full, roomy = with_calls(case, verdict), without_calls(case)
    return step_time(full).ns - step_time(roomy).ns
