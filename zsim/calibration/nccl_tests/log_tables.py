"""The table of an nccl-tests run by the names above its columns, which its versions have had in
several orders.

Since 2.11 every program prints all of size, count, type, redop and root. Before, each printed those
that it has: an all-reduce no root, a broadcast no redop, an all-gather neither. So where a log does
not say what it ran, its table says what it did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.calibration.nccl_tests.checks import Timed, number
from zsim.calibration.nccl_tests.log_lines import OF_PARTS

LEADING = ("size", "count", "type")
TIMES = ("time", "algbw", "busbw")
USUAL = (*LEADING, "redop", "root", *TIMES, "#wrong", *TIMES, "#wrong")
"""What is printed since 2.11, and more figures than before, so that no other row is taken for one
of these."""
COUNTED = ("#wrong", "error")
"""Columns of how many results are wrong, and before 2.11 of how far they are off, which its summary
judges."""
REDUCES: dict[str, bool] = {
    "all_reduce": True, "reduce_scatter": True, "all_gather": False, "broadcast": False
}
"""Whether a collective has an operation, which nccl-tests prints as `redop`, and "none" of those
that have not."""
WRONG = "wrong results"
UNCOUNTED = "N/A"
"""In place of a count where results were not looked at."""


@dataclass(frozen=True, slots=True)
class Table:
    """The names of a run's columns."""

    names: tuple[str, ...]

    @property
    def problem(self) -> str:
        """Why rows under these names cannot be read, "" where they can."""
        if self.names[: len(LEADING)] == LEADING and all(name in self.names for name in TIMES):
            return ""
        expected = "expected a line '# size count type ... time algbw busbw' above the rows"
        return f"no names of its columns: {expected}, found {' '.join(self.names)[:60] or 'none'}"

    def timed(self, cells: Sequence[str], collective: str) -> Timed:
        """The out-of-place time and bandwidths of a row.

        The first versions printed an all-gather's and a reduce-scatter's bus bandwidth twice, so it
        is no algorithm's bandwidth.
        """
        time, algorithm, bus = (cells[self.names.index(name)] for name in TIMES)
        is_twice = "root" not in self.names and collective in OF_PARTS and algorithm == bus
        return Timed(
            microseconds=number(time, "time"),
            algorithm=None if is_twice else number(algorithm, "algbw"),
            bus=number(bus, "busbw"),
        )

    def why_wrong(self, cells: Sequence[str]) -> str:
        """`WRONG` where any result of the row is, out of place or in place, why nobody knows it,
        and "" for neither."""
        found = [
            why
            for place in self._places("#wrong")
            if place < len(cells) and (why := _why_wrong(cells[place]))
        ]
        return WRONG if WRONG in found else "".join(found[:1])

    def why_not_called(self, collective: str, cells: Sequence[str]) -> str:
        """Why a row is not of the `collective` that its log says it ran, "" where it may be: what
        reduces has an operation."""
        if "redop" in self.names and "root" in self.names:
            operation = cells[self.names.index("redop")]
            if REDUCES[collective] == (operation == "none"):
                return f"its operation is {operation[:20]}, which contradicts {collective}"
        return ""

    def why_not_of(self, collective: str, cells: Sequence[str]) -> str:
        """Why a row cannot be of `collective` whatever it is called, "" where it can.

        Since 2.11 an all-gather's rows are those of an all-to-all and of a sendrecv but for one
        thing: those two do not run in place, so their results are counted out of place alone.
        """
        columns = [name for name in ("redop", "root") if name in self.names]
        if len(columns) < 2 and (
            REDUCES[collective] != ("redop" in columns)
            or (collective == "broadcast") != ("root" in columns)
        ):
            return (
                f"its table has {' and '.join(columns) or 'no redop and no root'}, which "
                f"contradicts {collective}"
            )
        counted = [
            cells[place] for name in COUNTED for place in self._places(name) if place < len(cells)
        ]
        if len(counted) == 2 and counted[1] == UNCOUNTED != counted[0]:
            return (
                f"its results are checked out of place alone, as of alltoall and sendrecv, which "
                f"contradicts {collective}"
            )
        return self.why_not_called(collective, cells)

    def _places(self, column: str) -> list[int]:
        return [place for place, name in enumerate(self.names) if name == column]


def table_of(lines: Sequence[str]) -> Table:
    """The table of a run's lines, by the first line that names columns; the usual one where
    somebody has left that line out."""
    for line in lines:
        if line.startswith("#") and "algbw" in line and "busbw" in line:
            return Table(tuple(line[1:].split()))
    return Table(USUAL)


def _why_wrong(cell: str) -> str:
    """What is wrong where so many results are, a number of six digits at most or as 1e+06."""
    if cell == UNCOUNTED:
        return ""
    try:
        return "" if float(cell) <= 0 else WRONG
    except ValueError:
        return f"#wrong: expected a number or {UNCOUNTED}, found {cell[:40]!r}"
