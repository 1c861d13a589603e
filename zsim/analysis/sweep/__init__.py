"""Sweeps: a scenario at every combination of values of its keys, as a table.

Axes say which points there are, a point is a row, workers compute them, the journal keeps what is
done, the table orders it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from zsim.analysis.sweep import workers as kinds
from zsim.analysis.sweep.axes import Axes, SweepError, axes_of, read
from zsim.analysis.sweep.journal import Journal
from zsim.analysis.sweep.point import FIGURES, Point, Row, row_of
from zsim.analysis.sweep.table import Sweep, require
from zsim.errors import ArgumentError, ScenarioError, ZsimError, shown
from zsim.io.units import counted
from zsim.scenario.scenario import Scenario
from zsim.scenario.scenario_argument import require_scenario

__all__ = ["Axes", "Sweep", "SweepError", "read", "sweep"]

MOST_TRIED = 64
"""Points that are read before any is computed, where all of them have a mistake."""
DIED = {
    "status": "died", "reason": "worker killed, perhaps for lack of memory",
    **dict.fromkeys(FIGURES),
}


def sweep(
    scenario: Scenario, axes: Mapping[str, Sequence[Any]] | Axes, *, on: str = "loky",
    workers: int | None = None, out: str | PathLike[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """`scenario` at every combination of `axes`, values by dotted key of a scenario.

    `on` and `workers`: which workers compute, and how many (default: loky's, one for each core).
    `out`: a .csv, .jsonl or .parquet file; rows that its journal has are not computed again. A
    point that cannot be is a row that says why. SweepError for axes that make no sweep, as a key
    that no scenario has.
    """
    require_scenario(scenario)
    chosen = axes if isinstance(axes, Axes) else axes_of(axes, where="axes")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ArgumentError(where="workers", expected="a number from 1 on", found=shown(workers))
    target = Path(out) if out is not None else None
    kinds.require(on)
    if target is not None:
        require(target)
    points = [Point(scenario.tables, scenario.folder, values) for values in chosen.points()]
    _require_known_keys(points)
    keys = [point.key() for point in points]
    journal = Journal(target and target.with_name(f"{target.name}.journal"))
    with journal:
        rows = journal.done(keys)
        kept = {*rows}
        try:
            _compute(points, keys, rows, journal, on=on, workers=workers, say=say)
        except KeyboardInterrupt as stop:
            stop.add_note(_resumable(journal, len(rows)))
            raise
    result = Sweep(
        chosen,
        tuple(
            {"point": number, **point.values, **rows[key]}
            for number, (point, key) in enumerate(zip(points, keys, strict=True))
        ),
        num_resumed=sum(key in kept for key in keys),
    )
    if target is not None:
        result.write(target)
    return result


def _require_known_keys(points: Sequence[Point]) -> None:
    """SweepError where each of the first points is refused for one and the same unknown key."""
    problems: set[str] = set()
    for point in points[:MOST_TRIED]:
        try:
            point.scenario()
        except ScenarioError as error:
            problems.add(error.problems[0].removeprefix("Scenario: "))
        except ZsimError:
            return
        else:
            return
        if len(problems) > 1:
            return
    key, _, known = problems.pop().partition(": unknown key")
    if known:
        raise SweepError(
            where=f"axes.{key}", expected="a key of scenarios", found="an unknown one",
            remedy=known.strip(",; "),
        )


def _resumable(journal: Journal, number: int) -> str:
    """A sentence on what an interrupted sweep leaves behind."""
    rows = counted(number, "row")
    if journal.path is None:
        return f"{rows} lost; with -o FILE.csv they would be kept"
    return f"{rows} kept in {journal.path}; the same command goes on"


def _compute(
    points: Sequence[Point], keys: Sequence[str], rows: dict[str, Row], journal: Journal, *,
    on: str, workers: int | None, say: Callable[[str], None],
) -> None:
    """Add the rows that `rows` lacks; equal points are computed once."""
    missing = {key: point for key, point in zip(keys, points, strict=True) if key not in rows}
    todo, begun, printed_at = list(missing), time.monotonic(), 0.0
    for number, row in kinds.results(row_of, list(missing.values()), on=on, workers=workers):
        key = todo[number]
        rows[key] = DIED if row is None else row
        journal.add(key, rows[key])
        done, now = len(rows) - (len(set(keys)) - len(todo)), time.monotonic()
        if now - printed_at > 0.5:
            printed_at = now
            left = (now - begun) / done * (len(todo) - done)
            say(f"{done:,} of {counted(len(todo), 'point')}, {left:,.0f} s left")
