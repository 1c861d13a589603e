"""Step times of planned scenarios and their bands, without a Run: for whoever compares many."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.engine.bands import error_bands
from zsim.engine.costs.op_costs import Costs
from zsim.engine.equal_micro_batches import repeated
from zsim.engine.simulate_step import simulate_step
from zsim.engine.timeline import Timeline
from zsim.ir.laws.validate import validate
from zsim.ir.program import Program
from zsim.runs.figures.metrics import band_ns
from zsim.scenario.plan import Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A simulated step time, and the band that the true one is expected in, in nanoseconds."""

    ns: int
    band_ns: tuple[int, int]


def step_time(planned: Planned) -> StepTime:
    """The step time of the scenario's Run, without the Run: no memory is replayed for it."""
    scenario = planned.scenario
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    timeline = simulate_step(validate(planned.program, memory=False), costs=costs)
    return timed(planned.program, timeline, costs)


def timed(program: Program, timeline: Timeline, costs: Costs) -> StepTime:
    """The step time of a simulated `timeline`, with the band that its Run has."""
    ns = timeline.step_time_ns
    return StepTime(ns=ns, band_ns=band_ns(ns, error_bands.band(program, timeline, costs=costs)))


def step_time_of_more(planned: Planned, *, times: int) -> StepTime | None:
    """The step time with the fourth of the five micro-batches done `times` more, as `step_time` has
    it of such a scenario; None where they are not alike."""
    scenario, program = planned.scenario, validate(planned.program, memory=False)
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    more = repeated(program, costs=costs, times=times)
    if more is None:
        return None
    band = error_bands.band(program, more.timeline, costs=costs, repeated=more)
    return StepTime(ns=more.step_time_ns, band_ns=band_ns(more.step_time_ns, band))
