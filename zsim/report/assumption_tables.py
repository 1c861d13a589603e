"""Waterfall of memory and the table of assumptions, for the page."""

from __future__ import annotations

from dataclasses import asdict

from zsim.io.units import format_bytes
from zsim.memory import waterfall
from zsim.report.sides import Rows, SimulatedStep
from zsim.report.timeline_tables import Table

ORDER = ("assumed", "vendor sheet", "source code", "published", "calibrated", "measured")
"""Provenances from the least certain to the surest."""


def memory_waterfall(step: SimulatedStep) -> Table:
    """The steps from the formula to what is needed, with the bands of need and capacity."""
    verdict = step.memory
    return {
        "stages": [asdict(stage) for stage in waterfall.waterfall(step.scenario, verdict)],
        "needed": list(asdict(verdict.needed).values()),
        "capacity": list(asdict(verdict.capacity).values()),
        "verdict": verdict.on_device,
    }


def assumed(step: SimulatedStep) -> Rows:
    """Constant, value, provenance and source: the least certain first."""
    cluster, verdict = step.scenario.cluster, step.memory
    runtime = cluster.device.runtime
    figures = [*cluster.figures, *(runtime.figures if runtime else ())]
    rows = [[each.key, each.text, each.provenance, each.source] for each in figures]
    rows += [
        [each.name, f"{format_bytes(each.nbytes)} ({format_bytes(each.low)} to "
                    f"{format_bytes(each.high)})", each.provenance,
         each.source + ("" if each.confirmed else "; not confirmed on a GPU")]
        for each in verdict.outside
    ]
    rows.append(["construction", "", "assumed", waterfall.BUILT[verdict.built_on_device]])
    rows.sort(key=lambda row: ORDER.index(row[2]))
    return rows
