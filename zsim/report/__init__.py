"""Report: one HTML page about scenarios and saved Runs, for people to look at.

Tables are made here, without units and pixels; the scripts in `web` draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zsim.report import sides as kinds
from zsim.report.assumption_tables import assumed, memory_waterfall
from zsim.report.candidate_tables import candidates
from zsim.report.html_page import ReportError, drawing_library, page
from zsim.report.memory_tables import holders, memory_table
from zsim.report.sides import ReportSide, of_record, of_scenario
from zsim.report.timeline_tables import Table, timelines
from zsim.report.topology_tables import topology

__all__ = ["ReportError", "ReportSide", "data_of", "drawing_library", "of_record", "of_scenario",
           "report"]

SCHEMA_VERSION = 1


def report(sides: Sequence[ReportSide], *, say: Callable[[str], None] = lambda _: None) -> str:
    """The page about `sides`; ReportError without D3, or where it would be too large."""
    return page(data_of(sides, say=say), title=" · ".join(side.name for side in sides))


def data_of(sides: Sequence[ReportSide], *, say: Callable[[str], None] = lambda _: None) -> Table:
    """All that the page draws, as JSON has it."""
    return {
        "schema_version": SCHEMA_VERSION, "sides": [_side(side, say) for side in sides],
        "timeline": timelines(sides), "checks": kinds.checks(sides),
    }


def _side(side: ReportSide, say: Callable[[str], None]) -> Table:
    table: Table = {
        "name": side.name, "facts": kinds.facts(side), "step_ns": side.record.step_time_ns,
        "band_ns": side.band_ns, "memory": memory_table(side),
    }
    if side.step is None:
        return table
    say(f"{side.name}: every candidate simulated")
    return table | {
        "holders": holders(side.step), "topology": topology(side.step),
        "candidates": candidates(side.step.scenario), "waterfall": memory_waterfall(side.step),
        "assumed": assumed(side.step),
    }
