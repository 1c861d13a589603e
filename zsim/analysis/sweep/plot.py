"""Picture of a sweep by matplotlib: tokens/s against memory, by values of the first axis."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.analysis.sweep.axes import SweepError
from zsim.analysis.sweep.printed import computed, short
from zsim.errors import listed
from zsim.io import files
from zsim.io.extras import library

if TYPE_CHECKING:
    from zsim.analysis.sweep.table import Sweep

ENDINGS = (".svg", ".png", ".pdf")


def require(path: Path) -> None:
    """SweepError for a file of another ending, or where matplotlib is not installed."""
    if path.suffix not in ENDINGS:
        raise SweepError(
            where=f"--plot {path}", expected=f"a file that ends in {listed(ENDINGS)}",
            found=path.suffix or "no ending",
        )
    _figure()


def write(sweep: Sweep, path: Path) -> None:
    """Write the picture, in the form that the file's ending says."""
    picture = BytesIO()
    figure(sweep).savefig(picture, format=path.suffix[1:])
    files.write(path, picture.getvalue())


def figure(sweep: Sweep) -> Any:
    """matplotlib's Figure: points that fit are filled, others hollow; the front is joined."""
    rows, first = computed(sweep.rows), next(iter(sweep.axes.values))
    drawn = _figure()
    if not rows:
        raise SweepError(where="plot", expected="points that were computed", found="none")
    axes = drawn.add_subplot()
    for number, value in enumerate(map(short, sweep.axes.values[first])):
        own = [row for row in rows if short(row[first]) == value]
        for fits in (True, False):
            some = [row for row in own if (row["verdict"] != "OOM") is fits]
            axes.plot(
                *_places(some), "o", color=f"C{number % 10}",
                markerfacecolor=None if fits else "none", label=value if fits else f"_{value}",
            )
    axes.plot(*_places(sweep.front), "-", color="0.5", zorder=0, label="front")
    axes.set(xlabel="needed memory of the fullest rank, GiB (hollow: out of memory)",
             ylabel="tokens/s of all ranks", xlim=(0, None), ylim=(0, None))
    axes.legend(title=first.replace("$", r"\$"), fontsize=8)
    return drawn


def _places(rows: Any) -> tuple[list[float], list[int]]:
    return [row["needed_bytes"] / 2**30 for row in rows], [row["tokens_per_s"] for row in rows]


def _figure() -> Any:
    matplotlib = library(
        "matplotlib.figure", error=SweepError, where="--plot", expected="matplotlib",
        remedy="pip install 'zsim[plot]'",
    )
    return matplotlib.Figure(figsize=(8.0, 5.0), layout="constrained")
