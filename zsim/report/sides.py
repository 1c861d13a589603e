"""Sides of a report: scenarios that are simulated for it, and saved Runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim import api
from zsim.analysis import scenario_warnings
from zsim.analysis.causes.why import Why
from zsim.analysis.simulated_step import explain_step, simulated_step
from zsim.engine.timeline import Timeline
from zsim.errors import ZsimError
from zsim.io.units import counted, format_bytes, format_time
from zsim.ir.program import Program
from zsim.ir.run import RunRecord, band_of
from zsim.memory import fits
from zsim.memory.fits import MemoryVerdict
from zsim.runs.comparison import compare_records
from zsim.runs.figures import metrics
from zsim.runs.run import Run
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario

Rows = list[list[str]]
"""Rows of text, as a table shows them."""


class ReportSideError(ZsimError):
    """A Run that a report can say nothing of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The steady step of a scenario, with all that it was simulated from and its need of memory."""

    scenario: Scenario
    run: Run
    program: Program
    timeline: Timeline
    memory: MemoryVerdict

    def why(self, rank: int) -> Why:
        """Exposed collectives and the critical path of `rank`."""
        return explain_step(self.scenario, self.program, self.timeline, rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSide:
    """One side: the record of a Run, and for a scenario also its simulated step. A saved Run has
    neither Program nor cluster."""

    name: str
    record: RunRecord
    step: SimulatedStep | None = None

    @property
    def band_ns(self) -> tuple[int, int] | None:
        """The band of the step time; None where it was measured."""
        factors, time = band_of(self.record), self.record.step_time_ns
        return metrics.band_ns(time, factors) if factors and time else None


def of_scenario(scenario: Scenario) -> ReportSide:
    """The side of a scenario; a ZsimError where it cannot be simulated."""
    run = api.simulate(scenario)
    program, timeline = simulated_step(scenario)
    step = SimulatedStep(
        scenario=scenario, run=run, program=program, timeline=timeline,
        memory=fits.assess(planned(scenario)),
    )
    return ReportSide(name=f"{scenario.name}, simulated", record=run.record, step=step)


def of_record(record: RunRecord) -> ReportSide:
    """The side of a saved Run; ReportSideError where no rank has ended its steady step."""
    ended = tuple(rank for rank in record.ranks if "steady" in rank.phases)
    if not ended:
        raise ReportSideError(
            where=record.scenario, expected="a Run with a steady step",
            found=f"one that did not reach it: {record.failure}"[:300],
        )
    record = replace(record, ranks=ended)
    how = "simulated" if record.interpreter == "simulator" else f"measured on {record.backend}"
    return ReportSide(name=f"{record.scenario}, {how}, saved", record=record)


def facts(side: ReportSide) -> Rows:
    """The figures of a side, each as name and text."""
    record, step = side.record, side.step
    rows = [
        ["ran on", f"{record.backend} ({record.interpreter}), "
                   f"{counted(record.world_size, 'rank')}"],
        ["mesh", str(record.mesh).removeprefix("mesh ")],
    ]
    if step is not None:
        scenario = step.scenario
        batch = scenario.batch
        rows += [
            ["model", f"{scenario.model.name}, {scenario.model.num_parameters:,} parameters"],
            ["strategy", f"{scenario.strategy}, checkpointing {scenario.checkpointing.mode}"],
            ["batch", f"micro_batch {batch.micro_batch}, sequence_length {batch.sequence_length:,}"
                      f", accumulation {batch.accumulation}"],
            ["cluster", f"{scenario.cluster.name}, {counted(scenario.cluster.num_nodes, 'node')}"],
            ["memory", f"{step.memory.verdict}: needs {format_bytes(step.memory.needed.nbytes)} "
                       f"({format_bytes(step.memory.needed.low)} to "
                       f"{format_bytes(step.memory.needed.high)}) of "
                       f"{format_bytes(step.memory.capacity.nbytes)}"],
        ]
    if (time := record.step_time_ns) is not None:
        band = side.band_ns
        between = f" ({format_time(band[0])} to {format_time(band[1])})" if band else ""
        rows += [["step time", format_time(time) + between]]
    spans = [rank for rank in record.ranks if rank.spans]
    if spans and record.world_size > 1:
        exposed = max(map(metrics.exposed_ns, spans))
        rows += [["exposed communication", format_time(exposed)]]
    if step is not None and step.run.mfu is not None:
        rows += [["MFU", f"{100 * step.run.mfu:.1f} %"]]
    peak = max(rank.phases["steady"].memory.peak_bytes for rank in record.ranks)
    sent = max(rank.bytes_sent for rank in record.ranks)
    rows += [["allocated at the peak", format_bytes(peak)]]
    rows += [["sent per rank", format_bytes(sent)]] if sent else []
    rows += [["fault", fault] for fault in record.faults]
    return [*rows, *(["warning", text] for text in _warnings(side))]


def _warnings(side: ReportSide) -> list[str]:
    if side.step is None:
        return [] if side.record.complete else [side.record.failure]
    return [caveat.text for caveat in scenario_warnings.caveats(side.step.scenario)]


def checks(sides: Sequence[ReportSide]) -> Rows:
    """The checks of the first measured side against the first simulated side of the same
    experiment, each as name, status and text; [] without such a pair."""
    simulated = [side.record for side in sides if side.record.interpreter == "simulator"]
    for measured in (side.record for side in sides if side.record.interpreter != "simulator"):
        for predicted in simulated:
            if _of_one_experiment(predicted, measured):
                try:
                    comparison = compare_records(predicted, measured)
                except ZsimError:  # such as other ranks: nothing to compare
                    continue
                return [[each.name, each.status, each.detail] for each in comparison.checks]
    return []


def _of_one_experiment(predicted: RunRecord, measured: RunRecord) -> bool:
    keys = ("fingerprint", "device")
    return all(predicted.provenance.get(key) == measured.provenance.get(key) for key in keys)
