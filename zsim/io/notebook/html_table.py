"""Short tables as HTML, for notebooks: every text escaped, no style but alignment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from zsim.io.units import counted

MOST_ROWS = 20


def html_table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], *, note: str = ""
) -> str:
    """A table of the first `MOST_ROWS` rows with the number of the others, and a `note` below.

    >>> html_table("a < b", ["x"], [[1]])
    '<table><caption>a &lt; b</caption><thead><tr><th>x</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """  # noqa: E501 - the output is one line
    every = list(rows)
    shown = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in every[:MOST_ROWS])
    more = len(every) - MOST_ROWS
    notes = [f"and {counted(more, 'more row')}"] if more > 0 else []
    remarks = "; ".join([*notes, *filter(None, [note])])
    head = f"<thead><tr>{_cells(heads, 'th')}</tr></thead>" if any(heads) else ""
    return (
        f"<table><caption>{escape(caption)}</caption>{head}<tbody>{shown}</tbody></table>"
        + (f"<p>{escape(remarks)}</p>" if remarks else "")
    )


def _cells(cells: Iterable[object], tag: str) -> str:
    return "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells)
