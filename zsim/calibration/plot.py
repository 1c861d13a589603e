"""A picture of predicted against measured times, as SVG, drawn by matplotlib.

Both axes are logarithmic; lines show the diagonal and 10 % on both sides. Each source has a colour
and a marker of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from zsim.calibration.row_predictions import Predicted
from zsim.errors import ZsimError
from zsim.io import files
from zsim.io.extras import library

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours of Okabe and Ito, for readers with any colour vision."""
MARKERS = ("o", "s", "^", "D", "v")
REST = ("#999999", "x")
"""Colour and marker of sources that are not named."""
MOST_NAMES = len(COLORS) * len(MARKERS)
LONGEST_NAME = 40
"""Characters of a source in the legend."""


class PlotError(ZsimError):
    """A plot that cannot be drawn."""


def require(path: Path) -> None:
    """PlotError for another ending than .svg, or where matplotlib is not installed."""
    if path.suffix != ".svg":
        raise PlotError(
            where=str(path), expected="a file that ends in .svg", found=path.suffix or "no ending",
            remedy=f"pictures are drawn as SVG alone: --plot {path.stem}.svg",
        )
    _figure()


def write(rows: Sequence[Predicted], path: Path) -> None:
    """The picture of the rows that are times; PlotError for none of them."""
    require(path)
    times = [row for row in rows if row.unit == "s"]
    if not times:
        raise PlotError(where=str(path), expected="times that were predicted", found="none")
    picture = BytesIO()
    with _settings():
        _drawn(times).savefig(picture, format="svg", metadata={"Date": None})
    files.write(path, picture.getvalue().decode())


def _figure() -> Any:
    """matplotlib's Figure, which keeps no global state; PlotError where it is not installed."""
    return library(
        "matplotlib.figure", error=PlotError, where="--plot",
        expected="matplotlib, which draws the picture", remedy="pip install 'zsim[plot]'",
    ).Figure


def _settings() -> Any:
    """matplotlib's defaults, whatever its user has set; text stays text, and ids are repeatable."""
    from matplotlib import rc_context, rcParamsDefault

    return rc_context({
        **{key: value for key, value in rcParamsDefault.items() if key.startswith(_OWN)},
        "svg.hashsalt": "zsim", "svg.fonttype": "none",
    })


_OWN = ("axes.", "font.", "legend.", "lines.", "xtick.", "ytick.", "savefig.", "figure.", "grid.")


def _drawn(rows: Sequence[Predicted]) -> Any:
    """The figure of `rows`."""
    figure = _figure()(figsize=(9.6, 6.4), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", aspect="equal"
    )
    values = [value for row in rows for value in (row.predicted, row.measured)]
    ends = [min(values) / 1.5, max(values) * 1.5]
    lines = ((1.0, "-", "as measured"), (1.1, ":", "± 10 %"), (1 / 1.1, ":", ""))
    for factor, style, name in lines:
        axes.plot(
            ends, [factor * end for end in ends], color="#888888", linestyle=style, linewidth=1,
            label=name or None, zorder=1,
        )
    sources = list(dict.fromkeys(row.source for row in rows))
    room = len(sources) if len(sources) <= MOST_NAMES else MOST_NAMES - 1
    marks = [(color, marker) for marker, color in product(MARKERS, COLORS)]
    for number, source in enumerate(sources[:room]):
        _scatter(axes, [row for row in rows if row.source == source], marks[number], _cut(source))
    if others := [row for row in rows if row.source in sources[room:]]:
        _scatter(axes, others, REST, f"and {len(sources) - room} more sources")
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.grid(color="#dddddd", linewidth=0.5)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _scatter(axes: Any, rows: Sequence[Predicted], mark: tuple[str, str], name: str) -> None:
    color, marker = mark
    axes.scatter(
        [row.measured for row in rows], [row.predicted for row in rows], s=18, c=color,
        marker=marker, alpha=0.6, linewidths=1 if marker == "x" else 0, label=name, zorder=2,
    )


def _cut(name: str) -> str:
    """A source's name without matplotlib's own signs, and no longer than the legend has room."""
    plain = name.replace("$", "").lstrip("_") or "?"
    return plain if len(plain) <= LONGEST_NAME else f"…{plain[1 - LONGEST_NAME :]}"
