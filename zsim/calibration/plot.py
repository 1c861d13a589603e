"""A picture of predicted against measured, as SVG: one point per row on two logarithmic axes, the
diagonal, and 10 % on both sides.

Each source has a mark of its own, a colour and a shape, which the list beside the axes names. Where
that has not room for all of them, the rest share a mark that is nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from zsim.calibration.accuracy import Predicted
from zsim.errors import ZsimError
from zsim.io import files

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
"""Of marks: seven sources have circles, the next seven squares, and so on, so that each of 35 has a
mark of its own."""
REST = "#999999"
"""The colour of sources that are not named."""
LINE = 16
MOST_NAMES = (SIDE - 2 * MARGIN) // LINE
"""Lines that the list has room for: fewer than there are marks."""
LONGEST_NAME, SHORT_NAME, LETTER = 34, 20, 7
"""Letters of a name that is cut, those that fit beside the axes however wide the reader's letters
are, and pixels of each letter of a name between the two, which is told how wide it is: else 34
capitals would run off the picture."""


class PlotError(ZsimError):
    """A plot that cannot be drawn."""


def require(path: Path) -> None:
    """PlotError for another ending than .svg: said before anything is predicted."""
    if path.suffix != ".svg":
        raise PlotError(
            where=str(path),
            expected="a file that ends in .svg",
            found=path.suffix or "no ending",
            remedy=f"pictures are drawn as SVG alone: --plot {path.stem}.svg, which browsers show "
                   f"and Inkscape turns into others",
        )


def write(rows: Sequence[Predicted], path: Path) -> None:
    """The picture as a file; PlotError for another ending than .svg and for no rows."""
    require(path)
    if not rows:
        raise PlotError(where=str(path), expected="rows that were predicted", found="none")
    files.write(path, "\n".join(_svg(rows)) + "\n")


def _svg(rows: Sequence[Predicted]) -> Iterator[str]:
    values = [value for row in rows for value in (row.predicted, row.measured)]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    span = max(1, high - low)

    def place(value: float) -> float:
        return MARGIN + (log10(value) - low) / span * (SIDE - 2 * MARGIN)

    width = SIDE + LEGEND
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{SIDE}" '
        f'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{width}" height="{SIDE}" fill="white"/>'
    for decade in range(low, high + 1):
        at = place(10.0**decade)
        yield (
            f'<path d="M{at:.1f} {MARGIN}V{SIDE - MARGIN}M{MARGIN} '
            f'{SIDE - at:.1f}H{SIDE - MARGIN}" stroke="#ddd"/>'
        )
        yield (
            f'<text x="{at:.1f}" y="{SIDE - MARGIN + 18}" '
            f'text-anchor="middle">{10.0**decade:g}</text>'
        )
        yield (
            f'<text x="{MARGIN - 8}" y="{SIDE - at + 4:.1f}" '
            f'text-anchor="end">{10.0**decade:g}</text>'
        )
    for factor, style, words in (
        (1.0, "#444", "as measured"), (1.1, "#bbb", "+10 %"), (1 / 1.1, "#bbb", "-10 %")
    ):
        shift = log10(factor) / span * (SIDE - 2 * MARGIN)
        start, end = MARGIN, SIDE - MARGIN
        yield (
            f'<path d="M{start} {SIDE - start - shift:.1f}L{end} {SIDE - end - shift:.1f}" '
            f'stroke="{style}" fill="none"/>'
        )
        beside = SIDE - end - shift + (4 if factor == 1.0 else -8 if factor > 1.0 else 18)
        yield f'<text x="{end + 4}" y="{beside:.1f}" font-size="10" fill="#666">{words}</text>'
    sources = list(dict.fromkeys(row.source for row in rows))
    named = {source: place_of for place_of, source in enumerate(sources[: _num_named(sources)])}
    for row in rows:
        title = escape(f"{row.source} line {row.line}: {100 * row.error:+.1f} %")
        mark = _mark(named.get(row.source), place(row.measured), SIDE - place(row.predicted))
        yield f'{mark} fill-opacity="0.6"><title>{title}</title>{_end(mark)}'
    yield from _legend(sources)
    yield f'<text x="{SIDE / 2}" y="{SIDE - 20}" text-anchor="middle">measured, s</text>'
    yield (
        f'<text x="20" y="{SIDE / 2}" text-anchor="middle" transform="rotate(-90 20 '
        f'{SIDE / 2})">predicted, s</text>'
    )
    yield "</svg>"


def _num_named(sources: Sequence[str]) -> int:
    """How many of the sources the list has room for, and for the line that counts the rest."""
    return len(sources) if len(sources) <= MOST_NAMES else MOST_NAMES - 1


def _mark(place_of: int | None, x: float, y: float) -> str:
    """The mark of a named source, or with None of the rest, at a place of the picture, without the
    end of its element."""
    if place_of is None:
        return f'{SHAPES[0].format(x=x, y=y)} fill="{REST}"'
    shape = SHAPES[place_of // len(COLORS) % len(SHAPES)]
    return f'{shape.format(x=x, y=y)} fill="{COLORS[place_of % len(COLORS)]}"'


def _end(mark: str) -> str:
    return "</circle>" if mark.startswith("<circle") else "</path>"


def _legend(sources: Sequence[str]) -> Iterator[str]:
    """The sources' marks and names beside the picture, as many as there is room for, and how many
    more there are."""
    named = _num_named(sources)
    for place_of, source in enumerate(sources[:named]):
        name = source if len(source) <= LONGEST_NAME else f"…{source[1 - LONGEST_NAME :]}"
        yield from _line(place_of, place_of, name)
    if named < len(sources):
        yield from _line(named, None, f"and {len(sources) - named} more sources")


def _line(number: int, place_of: int | None, words: str) -> Iterator[str]:
    """One line of the list: a mark and words, which are told how wide they are where they could be
    too wide."""
    x, y = SIDE + 10, MARGIN + LINE * number
    width = (
        f' textLength="{LETTER * len(words)}" lengthAdjust="spacingAndGlyphs"'
        if len(words) > SHORT_NAME
        else ""
    )
    yield f"{_mark(place_of, x, y)}/>"
    yield f'<text x="{x + 10}" y="{y + 4}"{width}>{escape(words)}</text>'
