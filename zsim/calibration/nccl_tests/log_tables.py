"""The table of an nccl-tests run by the names above its columns, whose order differs by version.

Since 2.11 every program prints all of size, count, type, redop and root. Before, each printed those
that it has: an all-reduce no root, a broadcast no redop, an all-gather neither. So the table of a
log without a collective's name excludes some collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.calibration.nccl_tests.checks import Timed, number
from zsim.calibration.nccl_tests.log_lines import OF_PARTS

LEADING = ("size", "count", "type")
TIMES = ("time", "algbw", "busbw")
USUAL = (*LEADING, "redop", "root", *TIMES, "#wrong", *TIMES, "#wrong")
"""Columns printed since 2.11: more than before, so that no other row is taken for one of these."""
COUNTED = ("#wrong", "error")
"""Columns of the number of wrong results, and before 2.11 of their error, which its summary judges.
"""
REDUCES: dict[str, bool] = {
    "all_reduce": True, "reduce_scatter": True, "all_gather": False, "broadcast": False
}
"""True for a collective with an operation, which nccl-tests prints as `redop`; it prints "none" for
the others."""
WRONG = "wrong results"
UNCOUNTED = "N/A"
"""Text in place of a count where nccl-tests did not check results."""


@dataclass(frozen=True, slots=True)
class LogTable:
    """The names of a run's columns."""

    names: tuple[str, ...]

    @property
    def problem(self) -> str:
        """The reason why rows under these names cannot be read, "" where they can."""
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
        """`WRONG` where any result of the row is, out of place or in place; else the problem of its
        count, or ""."""
        problems = [
            problem
            for index in self._places("#wrong")
            if index < len(cells) and (problem := _why_wrong(cells[index]))
        ]
        return WRONG if WRONG in problems else "".join(problems[:1])

    def why_not_called(self, collective: str, cells: Sequence[str]) -> str:
        """The reason why a row is not of the `collective` that its log names, else "": only
        reductions have an operation."""
        if "redop" in self.names and "root" in self.names:
            operation = cells[self.names.index("redop")]
            if REDUCES[collective] == (operation == "none"):
                return f"its operation is {operation[:20]}, which contradicts {collective}"
        return ""

    def why_not_of(self, collective: str, cells: Sequence[str]) -> str:
        """The reason why a row cannot be of `collective`, whatever its log says, else "".

        Since 2.11 the rows of an all-to-all and of a sendrecv are nearly those of an all-gather.
        Those two do not run in place, so that their results are counted out of place alone.
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
            cells[index] for name in COUNTED for index in self._places(name) if index < len(cells)
        ]
        if len(counted) == 2 and counted[1] == UNCOUNTED != counted[0]:
            return (
                f"its results are checked out of place alone, as of alltoall and sendrecv, which "
                f"contradicts {collective}"
            )
        return self.why_not_called(collective, cells)

    def _places(self, column: str) -> list[int]:
        return [index for index, name in enumerate(self.names) if name == column]


def table_of(lines: Sequence[str]) -> LogTable:
    """The table of a run's lines, by the first line that names columns; the usual one where that
    line is missing."""
    for line in lines:
        if line.startswith("#") and "algbw" in line and "busbw" in line:
            return LogTable(tuple(line[1:].split()))
    return LogTable(USUAL)


def _why_wrong(cell: str) -> str:
    """The problem of a cell with the number of wrong results, of six digits at most or as 1e+06."""
    if cell == UNCOUNTED:
        return ""
    try:
        return "" if float(cell) <= 0 else WRONG
    except ValueError:
        return f"#wrong: expected a number or {UNCOUNTED}, found {cell[:40]!r}"
