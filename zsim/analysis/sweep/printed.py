"""Rows of a sweep for people: as text and as HTML, with those that fit first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zsim.analysis.sweep.point import Row
from zsim.io.notebook.html_table import html_table
from zsim.io.units import counted, format_bytes, format_time

if TYPE_CHECKING:
    from zsim.analysis.sweep.table import Sweep

MOST_LINES = 40
"""Rows of the printed table; the fastest of more."""
MOST_REASONS = 8
"""Lines with reasons, the most frequent first."""
_NUMBER = re.compile(r"\d[\d,.]*")


def short(value: Any) -> str:
    """A value of an axis; a table by its values, as "fsdp2 false"."""
    if isinstance(value, dict):
        return " ".join(map(short, value.values()))
    return str(value).lower() if isinstance(value, bool) else str(value)


def computed(rows: Sequence[Row]) -> list[Row]:
    """The rows with figures: those that fit first, each kind by tokens/s."""
    able = [row for row in rows if row["status"] == "ok"]
    return sorted(able, key=lambda row: (row["verdict"] == "OOM", -row["tokens_per_s"],
                                         row["point"]))


def as_html(sweep: Sweep) -> str:
    """All computed points as a table."""
    names, able = list(sweep.axes.values), computed(sweep.rows)
    return html_table(
        repr(sweep)[1:-1], (*names, "", "needs", "step", "tokens/s"),
        [(*(short(row[name]) for name in names), row["verdict"],
          format_bytes(row["needed_bytes"]), format_time(row["step_time_ns"]),
          f"{row['tokens_per_s']:,}") for row in able],
        note=f"{len(sweep.rows) - len(able):,} of {len(sweep.rows):,} points are refused or "
             "failed" if len(able) < len(sweep.rows) else "",
    )


def lines(sweep: Sweep) -> Iterator[str]:
    """The table of `zsim sweep`, its statuses, and the reasons of what was not computed."""
    counts = Counter(row["status"] for row in sweep.rows)
    yield f"{counted(len(sweep.rows), 'point')}: " + ", ".join(
        f"{number:,} {status}" for status, number in sorted(counts.items())
    )
    able = computed(sweep.rows)
    fitting = [row for row in able if row["verdict"] != "OOM"]
    shown = fitting[:MOST_LINES] or sorted(able, key=lambda row: row["needed_bytes"])[:MOST_LINES]
    if shown:
        yield from _table(sweep, shown)
    if len(fitting) > len(shown):
        yield (f"   the {len(shown)} with most tokens/s of {len(fitting):,} that fit; "
               "-o FILE.csv has them all")
    if short_of_memory := len(able) - len(fitting):
        are = "is" if short_of_memory == 1 else "are"
        yield f"   {short_of_memory:,} {'more ' * bool(fitting)}{are} out of memory"
    if fitting:
        yield "   * none that fits needs less and is as fast; -> most tokens/s that fits"
    yield from _reasons(sweep.rows)


def _table(sweep: Sweep, rows: Sequence[Row]) -> Iterator[str]:
    names, best = list(sweep.axes.values), sweep.best
    chosen = sorted(rows, key=lambda row: row["point"])
    widths = [max([len(name), *(len(short(row[name])) for row in chosen)]) for name in names]
    heads = "  ".join(f"{name:{width}}" for name, width in zip(names, widths, strict=True))
    yield f"   {heads}  {'':5} {'needs':>10} {'step':>10} {'tokens/s':>11}"
    front = {row["point"] for row in sweep.front}
    for row in chosen:
        mark = "->" if best and row["point"] == best["point"] else (
            " *" if row["point"] in front else "  "
        )
        cells = "  ".join(
            f"{short(row[name]):{width}}" for name, width in zip(names, widths, strict=True)
        )
        yield (
            f"{mark} {cells}  {row['verdict']:5} {format_bytes(row['needed_bytes']):>10} "
            f"{format_time(row['step_time_ns']):>10} {row['tokens_per_s']:>11,}"
        )


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each reason; those that differ in numbers alone are one."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            alike.setdefault(_NUMBER.sub("#", row["reason"]), []).append(row["reason"])
    kinds = sorted(alike.values(), key=lambda reasons: -len(reasons))
    for reasons in kinds[:MOST_REASONS]:
        others = "" if len({*reasons}) == 1 else " (others with other numbers)"
        yield f"   {len(reasons):,} x {reasons[0]}{others}"
    if rest := sum(map(len, kinds[MOST_REASONS:])):
        yield f"   {rest:,} more for other reasons, which -o FILE.csv has"
