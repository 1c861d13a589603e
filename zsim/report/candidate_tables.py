"""Candidates for the page: every stage with its memory, communication and time, the Pareto front,
and one reason for or against each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim import api
from zsim.analysis.fit.fit_table import Candidate, Fit
from zsim.analysis.simulated_step import add_driver_calls
from zsim.cluster.cluster import ClusterSpec
from zsim.errors import ZsimError
from zsim.io.system.parallel import mapped
from zsim.io.units import format_bytes, format_time
from zsim.ir.program import Program
from zsim.memory.full_device import with_calls
from zsim.report.timeline_tables import Table
from zsim.runs.backend import RunOptions
from zsim.runs.figures import metrics
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.plan import Planned
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

Figures = tuple[int, int, int]
"""Costs of a candidate: needed bytes, bytes sent per rank, nanoseconds."""


def candidates(scenario: Scenario) -> Table:
    """All candidates of `zsim fit` with what each sends, or the reason that there are none."""
    try:
        fitted = api.fit(derived(scenario, faults=()))
    except ZsimError as error:
        return {"candidates": [], "reason": str(error), "refused": []}
    traffic = mapped(_traffic, fitted.candidates)
    rows = [_row(*each) for each in zip(fitted.candidates, traffic, strict=True)]
    costs = [(row["needed"][0], row["sent_bytes"], row["step_ns"]) for row in rows]
    able = [row["verdict"] == "FITS" for row in rows]
    for row, own in zip(rows, costs, strict=True):
        better = next(
            (other["name"] for other, theirs, fits in zip(rows, costs, able, strict=True)
             if fits and dominates(theirs, own)), "",
        )
        row["front"] = row["verdict"] == "FITS" and not better
        row["why"] = _why(row, better, fitted)
    return {
        "candidates": rows, "reason": fitted.reason,
        "recommended": fitted.recommended.name if fitted.recommended else "",
        "refused": [list(each) for each in fitted.refused],
    }


def dominates(left: Sequence[int], right: Sequence[int]) -> bool:
    """True where `left` costs no more of anything, and less of something."""
    return left != right and all(a <= b for a, b in zip(left, right, strict=True))


def _traffic(candidate: Candidate) -> tuple[int, int]:
    """The most bytes that a rank sends in a step, and the longest exposed communication in ns.

    The allocator is replayed again only where it calls the driver: its calls may be known of a few
    micro-batches alone.
    """
    def as_known(program: Program, scenario: Scenario, _: ClusterSpec) -> Program:
        return with_calls(Planned(scenario, program), candidate.memory).program

    on_device = add_driver_calls if candidate.memory.driver_calls else as_known
    ranks = SimBackend(on_device=on_device).run(candidate.scenario, options=RunOptions()).ranks
    return max(rank.bytes_sent for rank in ranks), max(map(metrics.exposed_ns, ranks))


def _row(candidate: Candidate, traffic: tuple[int, int]) -> dict[str, Any]:
    other, needed = candidate.scenario, candidate.memory.needed
    sent_bytes, exposed_ns = traffic
    return {
        "name": candidate.name, "stage": STRATEGIES[other.strategy].formula.stage,
        "verdict": candidate.memory.verdict, "needed": [needed.nbytes, needed.low, needed.high],
        "capacity": candidate.memory.capacity.nbytes, "peak_at": candidate.memory.peak_at,
        "sent_bytes": sent_bytes, "exposed_ns": exposed_ns,
        "step_ns": candidate.step_time_ns, "band_ns": list(candidate.step_time_band_ns),
        "dropped": list(candidate.dropped), "running": candidate.memory.running,
    }


def _why(row: Table, better: str, fitted: Fit) -> str:
    """One reason for or against a candidate."""
    needed, capacity = format_bytes(row["needed"][0]), format_bytes(row["capacity"])
    if fitted.recommended is not None and row["name"] == fitted.recommended.name:
        return f"Recommended: {fitted.reason}."
    if row["verdict"] == "OOM":
        return f"OOM: needs {needed} of {capacity}; the peak is in {row['peak_at']}."
    if row["verdict"] == "TIGHT":
        return f"TIGHT: needs {needed} of {capacity}; {row['running'] or 'room is uncertain'}."
    if better:
        return f"No better than {better}: that needs, sends and takes no more."
    if fitted.recommended is None:
        return "Pareto front."
    ns = row["step_ns"] - fitted.recommended.step_time_ns
    saved = fitted.recommended.memory.needed.nbytes - row["needed"][0]
    return (
        f"Front: {format_time(abs(ns))} {'slower' if ns >= 0 else 'faster'} than the "
        f"recommended one, {format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'} memory."
    )
