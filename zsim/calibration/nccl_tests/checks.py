"""Checks that every row of nccl-tests' output passes, and the reasons of rows that do not.

Time, size and bandwidths say the same thing twice: a row whose figures contradict one another is
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite

from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.variables import UnmodelledError, choice
from zsim.calibration.records import Skipped, plain_number
from zsim.errors import Caveat

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
"""Bus bandwidth over size/time, by nccl-tests' convention (doc/PERFORMANCE.md)."""
CONTRADICTION = 0.05
"""Share by which a printed bandwidth of three digits may differ from size/time."""
MOST_BYTES = 1 << 44
LONGEST = 40
"""Characters of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows that can be predicted, and those that are skipped."""

    rows: tuple[LogRow, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def reasons(self) -> dict[str, int]:
        """Rows that are skipped for each reason."""
        counts: Counter[str] = Counter()
        for each in self.skipped:
            counts[each.reason] += each.count
        return dict(sorted(counts.items()))


class RefusedError(ValueError):
    """The reason why a row cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOrigin:
    """The file that a log is, and the collective that the user names for it, "" for none."""

    source: str
    collective: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Microseconds of a row, and GB/s of algorithm and bus bandwidth; None where not printed."""

    microseconds: float
    algorithm: float | None = None
    bus: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanRow:
    """A row as a log has it, before its checks: variables and the header's caveats beside it."""

    op: str
    gpu: str
    num_ranks: int
    num_nodes: int
    nbytes: int
    version: str
    variables: tuple[tuple[str, str], ...]
    assumed: tuple[str, ...]
    line: int


def collect(makers: Iterable[tuple[int, Callable[[], LogRow]]], source: str) -> Rows:
    """The row of each line that makes one; the others are skipped with their reason."""
    rows: list[LogRow] = []
    skipped: list[Skipped] = []
    for line, make in makers:
        try:
            rows.append(make())
        except RefusedError as refused:
            skipped.append(Skipped(source=source, line=line, reason=str(refused)))
        except (ArithmeticError, ValueError) as error:  # one row never ends a folder
            reason = f"no arithmetic can be done with its figures: {error}"
            skipped.append(Skipped(source=source, line=line, reason=reason))
    return Rows(rows=tuple(rows), skipped=tuple(skipped))


def checked(row: RanRow, timed: Timed, origin: LogOrigin) -> LogRow:
    """The row with its time; RefusedError where it contradicts itself, or has no model."""
    ranks, nodes = row.num_ranks, row.num_nodes
    if not (2 <= ranks <= 1 << 20 and 1 <= nodes <= ranks and ranks % nodes == 0):
        raise RefusedError("ranks and nodes contradict each other")
    if not 0 < row.nbytes <= MOST_BYTES or timed.microseconds <= 0:
        raise RefusedError("size or time is not above 0")
    algorithm = row.nbytes / timed.microseconds / 1000
    bus = algorithm * FACTORS[row.op](ranks)
    if _differ(timed.bus, bus) or _differ(timed.algorithm, algorithm):
        raise RefusedError("time, size and bus bandwidth contradict one another")
    try:
        ran = choice(
            row.variables, version=row.version, num_ranks=ranks, num_nodes=nodes, nbytes=row.nbytes
        )
    except UnmodelledError as error:
        raise RefusedError(str(error)) from None
    made = LogRow(
        op=row.op, gpu=row.gpu, num_ranks=ranks, num_nodes=nodes, nbytes=row.nbytes,
        microseconds=timed.microseconds, algorithm=ran.algorithm, nvls=ran.nvls,
        source=origin.source, line=row.line,
    )
    return replace(
        made, caveats=(*(Caveat(text, widens=0.5) for text in row.assumed), *ran.caveats)
    )


def _differ(printed: float | None, expected: float) -> bool:
    return printed is not None and abs(expected - printed) > max(CONTRADICTION * expected, 0.02)


def number(text: str, name: str) -> float:
    """The number in `text`, which the column `name` holds; RefusedError for none."""
    stripped = text.strip()
    if stripped.lower() in ("", "nan"):
        raise RefusedError(f"{name} missing or no number")
    if len(stripped) > LONGEST:
        raise RefusedError(f"{name}: expected a number, found {len(stripped):,} characters")
    try:
        parsed = plain_number(stripped)
    except ValueError:
        parsed = -1.0
    if not isfinite(parsed) or parsed < 0:
        raise RefusedError(f"{name}: expected a number of at least 0, found {stripped!r}")
    return parsed
