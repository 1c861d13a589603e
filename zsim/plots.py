"""A picture of predicted against measured, as SVG: one point per row on two logarithmic axes, the diagonal, and 10 % on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from zsim import places
from zsim.accuracy import Predicted
from zsim.errors import ZsimError

SIDE, MARGIN = 640, 70
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people who see colours differently can tell apart."""


class PlotError(ZsimError):
    """A plot that cannot be drawn."""


def require(path: Path) -> None:
    """PlotError for another ending than .svg: said before anything is predicted."""
    if path.suffix != ".svg":
        raise PlotError(
            where=str(path),
            expected="a file that ends in .svg",
            found=path.suffix or "no ending",
            remedy=f"pictures are drawn as SVG alone: --plot {path.stem}.svg, which browsers show and Inkscape turns into others",
        )


def write(rows: Sequence[Predicted], path: Path) -> None:
    """The picture as a file; PlotError for another ending than .svg and for no rows."""
    require(path)
    if not rows:
        raise PlotError(where=str(path), expected="rows that were predicted", found="none")
    places.write(path, "\n".join(_svg(rows)) + "\n")


def _svg(rows: Sequence[Predicted]) -> Iterator[str]:
    values = [value for row in rows for value in (row.predicted, row.measured)]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    span = max(1, high - low)

    def place(value: float) -> float:
        return MARGIN + (log10(value) - low) / span * (SIDE - 2 * MARGIN)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIDE}" height="{SIDE}" font-family="sans-serif" font-size="12">'
    yield f'<rect width="{SIDE}" height="{SIDE}" fill="white"/>'
    for decade in range(low, high + 1):
        at = place(10.0**decade)
        yield f'<path d="M{at:.1f} {MARGIN}V{SIDE - MARGIN}M{MARGIN} {SIDE - at:.1f}H{SIDE - MARGIN}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{SIDE - MARGIN + 18}" text-anchor="middle">{10.0**decade:g}</text>'
        yield f'<text x="{MARGIN - 8}" y="{SIDE - at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>'
    for factor, style in ((1.0, "#444"), (1.1, "#bbb"), (1 / 1.1, "#bbb")):
        shift = log10(factor) / span * (SIDE - 2 * MARGIN)
        start, end = MARGIN, SIDE - MARGIN
        yield f'<path d="M{start} {SIDE - start - shift:.1f}L{end} {SIDE - end - shift:.1f}" stroke="{style}" fill="none"/>'
    sources = list(dict.fromkeys(row.source for row in rows))
    for row in rows:
        x, y = place(row.measured), SIDE - place(row.predicted)
        color = COLORS[sources.index(row.source) % len(COLORS)]
        title = escape(f"{row.source} line {row.line}: {100 * row.error:+.1f} %")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" fill-opacity="0.6"><title>{title}</title></circle>'
    for place_of, source in enumerate(sources):
        y = MARGIN + 16 * place_of
        yield f'<circle cx="{MARGIN + 10}" cy="{y}" r="4" fill="{COLORS[place_of % len(COLORS)]}"/>'
        yield f'<text x="{MARGIN + 20}" y="{y + 4}">{escape(source)}</text>'
    yield f'<text x="{SIDE / 2}" y="{SIDE - 20}" text-anchor="middle">measured, s</text>'
    yield f'<text x="20" y="{SIDE / 2}" text-anchor="middle" transform="rotate(-90 20 {SIDE / 2})">predicted, s</text>'
    yield "</svg>"
