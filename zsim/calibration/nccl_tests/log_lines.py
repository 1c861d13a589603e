"""Lines of an nccl-tests table: rows, damaged rows, and rows whose size contradicts their elements.

NCCL's messages and shells write into the same file, and people edit it. A line with the figures of
a row in another shape is reported, so that no row is lost unseen. Mere reports, as the ranks of a
channel, hold no times and no dtype.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from zsim.calibration.records import DAMAGED, NUL

TYPE_BYTES = {
    **dict.fromkeys(("int8", "uint8", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
"""Bytes of an element by the name that nccl-tests prints (test_typenames in src/common.cu)."""
OPERATIONS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")
"""Values of nccl-tests' column `redop`."""
OF_PARTS = ("all_gather", "reduce_scatter")
"""Collectives with the count of one rank's part and the size of all parts (getCollByteCount of each
program)."""
FIGURES, FRACTIONS = 6, 2
"""Fewest figures of a row that has times, and how many of them have digits behind a point."""
_FIGURE = re.compile(r"[+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?:[KMGT]i?B?)?", re.IGNORECASE)


def is_row(line: str) -> bool:
    """True where the line begins with a size and a count."""
    return re.match(r"\s*\d+\s+\d+\s", line) is not None


def holds_row(line: str) -> bool:
    """True where the line holds a row's contents anywhere: figures with times, or a dtype with its
    operation."""
    cells = line.split()
    figures = [cell for cell in cells if _FIGURE.fullmatch(cell)]
    if len(figures) >= FIGURES and sum("." in figure for figure in figures) >= FRACTIONS:
        return True
    pairs = pairwise(cells)
    return len(figures) >= FRACTIONS and any(
        first in TYPE_BYTES and second in OPERATIONS for first, second in pairs
    )


def why_no_row(cells: Sequence[str], *, columns: int) -> str:
    """The reason why the cells of a line are no row of a table with so many columns, else "".

    A figure in place of the dtype means that another figure stands before the size.
    """
    if any(NUL in cell for cell in cells):
        return DAMAGED
    if not (cells[0].isdecimal() and cells[1].isdecimal()) or _FIGURE.fullmatch(
        "".join(cells[2:3])
    ):
        return f"expected a size in bytes where its line begins, found {cells[0][:40]!r}"
    return "fewer fields than the table has" if len(cells) < columns else ""


def why_not_its_count(collective: str, cells: Sequence[str], *, ranks: int) -> str:
    """The reason why a row's size contradicts its elements, "" where it does not or the dtype is
    unknown.

    nccl-tests rounds sizes to whole elements of whole parts before it prints both, so that they are
    equal to the byte.
    """
    if cells[2] not in TYPE_BYTES or not (cells[0].isdecimal() and cells[1].isdecimal()):
        return ""
    size, count, dtype = int(cells[0]), int(cells[1]), cells[2]
    parts = ranks if collective in OF_PARTS else 1
    if size == count * parts * TYPE_BYTES[dtype]:
        return ""
    of_ranks = f" of each of {ranks} ranks" if parts > 1 else ""
    return (
        f"size {size} contradicts {count} elements of {dtype}{of_ranks}, which are "
        f"{count * parts * TYPE_BYTES[dtype]} bytes"
    )
