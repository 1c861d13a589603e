"""Text behind a failing assertion on a Run: what lives at its peak, what is exposed and why, which
units issue its collectives.

A text is as long as pytest prints without -vv: eight lines, 640 characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from zsim import api
from zsim.io.quantities import Bytes, Duration
from zsim.io.units import format_bytes, format_time
from zsim.ir.ledger_replay import replay
from zsim.memory.holdings import alike, holdings
from zsim.models.training_options import Device
from zsim.runs.figures.run_figures import (
    CollectiveCount,
    ExposedCommunication,
    ExposedShare,
    PeakMemory,
    RunFigure,
)
from zsim.runs.run import Run
from zsim.scenario.plan import plan

MOST_ROWS = 5
MOST_UNITS = 3
"""Units that a row names."""
SIMULATOR = "simulator"


def comparison_lines(operator: str, left: object, right: object) -> list[str] | None:
    """Lines on a comparison that does not hold, for pytest's report; None where neither side is a
    figure of a Run."""
    for figure, other in ((left, right), (right, left)):
        explain = EXPLANATIONS.get(type(figure))
        run = getattr(figure, "run", None)
        if explain is not None and run is not None:
            claim = f"{_shown(left, figure)} {operator} {_shown(right, figure)}"
            return [claim, *explain(figure, other)]
    return None


def _shown(value: object, figure: object) -> str:
    """A side of the comparison, written as `figure` is."""
    if isinstance(figure, ExposedShare) and isinstance(value, int | float):
        return f"{100 * value:.2f} % of the step"
    if type(value) is int and isinstance(figure, PeakMemory):
        return repr(Bytes(value))
    if type(value) is int and isinstance(figure, ExposedCommunication):
        return repr(Duration(value))
    if isinstance(figure, CollectiveCount) and isinstance(value, int):
        return f"{int(value):,}"
    return repr(value)


def at_the_peak(figure: Any, other: object) -> Iterator[str]:
    """Kinds and units of the buffers that live at the peak, the largest first.

    Meters of real backends see no units. What is behind their peak is taken from the Program.
    """
    run: Run = figure.run
    number = max(
        run.ranks, key=lambda rank: (rank.phases["steady"].memory.peak_bytes, -rank.rank)
    ).rank
    device: Device = "cuda" if run.record.provenance.get("device") == "cuda" else "cpu"
    program = plan(run.scenario, device=device).of_rank(number)
    beyond = int(figure) - int(other) if isinstance(other, int) else 0
    peak = replay(program, timeline=False)["steady"]
    too_much = f"{format_bytes(beyond)} too much; " if beyond > 0 else ""
    is_simulated = run.record.interpreter == SIMULATOR
    simulated = "" if is_simulated else f"{format_bytes(peak.peak_bytes)} simulated, "
    yield f"{too_much}{simulated}on rank {number} in {peak.peak_at}:"
    rows = list(alike(holdings(program, "steady")))
    for kind, units, nbytes, _ in rows[:MOST_ROWS]:
        yield f"  {format_bytes(nbytes):>11}  {kind:<21} {units[:40]}"
    if rest := rows[MOST_ROWS:]:
        yield f"  {format_bytes(sum(row[2] for row in rest)):>11}  in {len(rest):,} rows more"


def exposed(figure: Any, other: object) -> Iterator[str]:
    """Reasons for the exposed communication, and the collectives that have most of it."""
    why = api.why(figure.run)
    simulated = "" if figure.run.record.interpreter == SIMULATOR else "simulated "
    step = f"the {simulated}step of {format_time(why.step_ns)} on rank {why.rank}"
    yield f"{format_time(why.exposed_ns)} of {step}:"
    for reason, ns in islice(why.by_reason.items(), 2):
        yield f"  {format_time(ns):>10}  {reason}"
    totals: dict[tuple[str, str, str], int] = {}
    for each in why.exposed:
        key = each.op.kind, each.op.unit, each.reason
        totals[key] = totals.get(key, 0) + each.exposed_ns
    largest = sorted(totals.items(), key=lambda item: -item[1])
    for (kind, unit, reason), ns in largest[: MOST_ROWS - 2]:
        yield f"  {format_time(ns):>10}  {kind} {unit}: {reason}"
    if rest := largest[MOST_ROWS - 2 :]:
        yield f"  {format_time(sum(ns for _, ns in rest)):>10}  {len(rest):,} others"


def issued(figure: Any, other: object) -> Iterator[str]:
    """Units that issue so many collectives of the kind, and the other kinds of the Run."""
    run: Run = figure.run
    rank = run.ranks[0]
    by_unit = Counter(span.unit for span in rank.spans if span.kind == figure.kind)
    if by_unit:
        yield f"{figure.kind} of rank {rank.rank}, by unit:"
    of_count: dict[int, list[str]] = {}
    for unit, count in by_unit.items():
        of_count.setdefault(count, []).append(unit)
    for count, units in islice(of_count.items(), MOST_ROWS):
        named = ", ".join(units[:MOST_UNITS])
        more = f" and {len(units) - MOST_UNITS:,} more" if len(units) > MOST_UNITS else ""
        yield f"  {count:>4}{' each' if len(units) > 1 else ''} of {named}{more}"
    kinds = [f"{kind} {traffic.count:,}" for kind, traffic in run.figures.collectives.items()]
    yield f"in all: {', '.join(kinds) or 'no collectives'}"


EXPLANATIONS: dict[type, Callable[[Any, object], Iterator[str]]] = {
    PeakMemory: at_the_peak, ExposedCommunication: exposed, ExposedShare: exposed,
    CollectiveCount: issued,
}
"""The text of each figure of a Run that a comparison did not hold for."""


def of_expectation(run: Run, name: str) -> Iterator[str]:
    """Lines on the figure of an entry of `[expect]` that does not hold; none for other figures."""
    figures: dict[str, RunFigure | None] = {
        "peak_memory": run.peak_memory, "exposed_communication": run.exposed_communication,
    }
    count = name.removesuffix("s")
    figure = figures.get(name)
    if figure is None and count in run.figures.collectives:
        figure = run.collectives.count(count)
    if figure is not None:
        yield from EXPLANATIONS[type(figure)](figure, figure)
