"""A picture of predicted against measured, as SVG: one point per row on two logarithmic axes, the diagonal, and 10 % on both sides.

Each source has a mark of its own, a colour and a shape, which the list beside the axes names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from zsim import places
from zsim.accuracy import Predicted
from zsim.errors import ZsimError

SIDE, MARGIN, LEGEND = 640, 70, 260
"""Pixels: of the square with the axes, around what is drawn in it, and of the names beside it."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people who see colours differently can tell apart."""
SHAPES = (
    '<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2"',
    '<path d="M{x:.1f} {y:.1f}m-3 -3h6v6h-6z"',
    '<path d="M{x:.1f} {y:.1f}m0 -4l4 7h-8z"',
    '<path d="M{x:.1f} {y:.1f}m0 -4.2l4.2 4.2l-4.2 4.2l-4.2 -4.2z"',
    '<path d="M{x:.1f} {y:.1f}m0 4l4 -7h-8z"',
)
"""Of marks: seven sources have circles, the next seven squares, and so on, so that each of 35 has a mark of its own."""
LINE = 16
MOST_NAMES = (SIDE - 2 * MARGIN) // LINE
LONGEST_NAME = 34


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

    width = SIDE + LEGEND
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{SIDE}" font-family="sans-serif" font-size="12">'
    yield f'<rect width="{width}" height="{SIDE}" fill="white"/>'
    for decade in range(low, high + 1):
        at = place(10.0**decade)
        yield f'<path d="M{at:.1f} {MARGIN}V{SIDE - MARGIN}M{MARGIN} {SIDE - at:.1f}H{SIDE - MARGIN}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{SIDE - MARGIN + 18}" text-anchor="middle">{10.0**decade:g}</text>'
        yield f'<text x="{MARGIN - 8}" y="{SIDE - at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>'
    for factor, style, words in ((1.0, "#444", "as measured"), (1.1, "#bbb", "+10 %"), (1 / 1.1, "#bbb", "-10 %")):
        shift = log10(factor) / span * (SIDE - 2 * MARGIN)
        start, end = MARGIN, SIDE - MARGIN
        yield f'<path d="M{start} {SIDE - start - shift:.1f}L{end} {SIDE - end - shift:.1f}" stroke="{style}" fill="none"/>'
        beside = SIDE - end - shift + (4 if factor == 1.0 else -8 if factor > 1.0 else 18)
        yield f'<text x="{end + 4}" y="{beside:.1f}" font-size="10" fill="#666">{words}</text>'
    sources = {source: place_of for place_of, source in enumerate(dict.fromkeys(row.source for row in rows))}
    for row in rows:
        title = escape(f"{row.source} line {row.line}: {100 * row.error:+.1f} %")
        mark = _mark(sources[row.source], place(row.measured), SIDE - place(row.predicted))
        yield f'{mark} fill-opacity="0.6"><title>{title}</title>{_end(mark)}'
    yield from _legend(list(sources))
    yield f'<text x="{SIDE / 2}" y="{SIDE - 20}" text-anchor="middle">measured, s</text>'
    yield f'<text x="20" y="{SIDE / 2}" text-anchor="middle" transform="rotate(-90 20 {SIDE / 2})">predicted, s</text>'
    yield "</svg>"


def _mark(place_of: int, x: float, y: float) -> str:
    """The mark of a source at a place of the picture, without the end of its element."""
    shape = SHAPES[place_of // len(COLORS) % len(SHAPES)]
    return f'{shape.format(x=x, y=y)} fill="{COLORS[place_of % len(COLORS)]}"'


def _end(mark: str) -> str:
    return "</circle>" if mark.startswith("<circle") else "</path>"


def _legend(sources: Sequence[str]) -> Iterator[str]:
    """The sources' marks and names beside the picture, as many as there is room for, and how many more there are."""
    more = len(sources) - MOST_NAMES
    shown = sources if more <= 0 else sources[: MOST_NAMES - 1]
    x = SIDE + 10
    for place_of, source in enumerate(shown):
        y = MARGIN + LINE * place_of
        name = source if len(source) <= LONGEST_NAME else f"…{source[1 - LONGEST_NAME :]}"
        yield f"{_mark(place_of, x, y)}/>"
        yield f'<text x="{x + 10}" y="{y + 4}">{escape(name)}</text>'
    if more > 0:
        yield f'<text x="{x + 10}" y="{MARGIN + LINE * len(shown) + 4}">and {len(sources) - len(shown)} more</text>'
