"""What every row of nccl measurements must hold, whatever file it comes from, and how those that do
not are named.

Every row is checked against itself: time, size and bandwidths say the same thing twice, so a time
in another unit, a size of one rank's part, or a wrong number of ranks contradicts them and is
refused. A row with a time alone is held to what its links can carry.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import isfinite

from zsim.calibration.nccl_tests.collective_names import collectives_of
from zsim.calibration.nccl_tests.note_words import UnmodelledError
from zsim.calibration.nccl_tests.rows import NcclRow, UnknownGpuError, mapped, predict
from zsim.calibration.nccl_tests.unit_words import another_unit, whole_message
from zsim.calibration.rows.records import plain_number
from zsim.cluster.collectives.nccl.curves import LARGE

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
"""Bus bandwidth over size/time, by nccl-tests' convention (doc/PERFORMANCE.md)."""
CONTRADICTION = 0.05
"""How far a printed bandwidth may be from size/time: times from a plot and bandwidths of three
digits are that exact."""
FASTEST, SLOWEST = 2.5, 1 / 300
"""Bus bandwidth over that of the links: above what a switch that reduces adds to a ring in a node,
and below any congestion of a large message."""
LEAST_US = 1.0
"""Of a collective: less than any kernel takes from its start to its end."""
LEAST_GB_S = 1.0
"""Of a bandwidth that a time is taken from: with two digits behind the point a smaller one says too
little."""
MOST_BYTES = 1 << 44
MOST_WHOLE = 1e15
"""Of a number that is whole: a double holds more to the unit, but nothing that is counted here is
as many."""
UNSAID = ("", "nan")
"""How a field is left empty, by people and by programs."""
LONGEST = 40
"""Characters of a number: programs write up to 25 of a double, and exact decimals some more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Rows that were not used: where, why, and how many, in the lines from `first` to `last` where
    they are a whole run's or table's."""

    source: str
    line: int
    reason: str
    count: int = 1
    first: int = field(default=0, compare=False)
    last: int = field(default=0, compare=False)
    impossible: NcclRow | None = field(default=None, compare=False)
    """The row, where its time and size are what no links are that fast or slow for: it says
    something of its whole series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a file gave: rows that can be predicted, and those that were skipped, by name."""

    rows: tuple[NcclRow, ...]
    skipped: tuple[Skipped, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows were skipped for each reason."""
        counts: Counter[str] = Counter()
        for one in self.skipped:
            counts[one.reason] += one.count
        return dict(sorted(counts.items()))


class RefusedError(ValueError):
    """Why a row cannot be used; `impossible` is the row where no links are that fast, or that slow.
    """

    def __init__(self, reason: str, *, impossible: NcclRow | None = None) -> None:
        super().__init__(reason)
        self.impossible = impossible


def collect(makers: Iterable[tuple[int, Callable[[], NcclRow]]], source: str) -> Rows:
    """The row of each line that makes one; the others are skipped with their reason."""
    rows: list[NcclRow] = []
    skipped: list[Skipped] = []
    for line, make in makers:
        try:
            rows.append(make())
        except RefusedError as refused:
            skipped.append(
                Skipped(
                    source=source, line=line, reason=str(refused), impossible=refused.impossible
                )
            )
        except (ArithmeticError, ValueError) as error:  # one row never ends a folder
            skipped.append(
                Skipped(
                    source=source, line=line,
                    reason=f"no arithmetic can be done with its figures: {error}",
                )
            )
    return Rows(rows=tuple(rows), skipped=tuple(skipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What is known of a file that it need not say itself: where it lies, and what the user says of
    the machine and the run."""

    source: str
    collective: str = ""
    gpu: str = ""
    inter_node: str = ""
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What a row says of its time: microseconds, and GB/s of the algorithm's and of the bus
    bandwidth; None where it does not say."""

    microseconds: float | None
    algorithm: float | None = None
    bus: float | None = None


def checked(row: NcclRow, timed: Timed) -> NcclRow:
    """The row with its time, if it contradicts neither itself nor what there is a model of;
    RefusedError otherwise."""
    name = (
        next(iter(collectives_of(row.collective)), "")
        if re.fullmatch(r"[A-Za-z_\- ]{6,30}", row.collective)
        else ""
    )
    if name not in FACTORS:
        raise RefusedError(f"collective {row.collective[:40]!r} has no model")
    if unit := another_unit(row.notes):
        raise RefusedError(f"another unit: {unit[:40]!r}")
    row = replace(
        row, collective=name,
        size_bytes=whole_message(name, row.size_bytes, ranks=row.n_ranks, words=row.notes),
    )
    if not (
        2 <= row.n_ranks <= 1 << 20
        and 1 <= row.n_nodes <= row.n_ranks
        and row.n_ranks % row.n_nodes == 0
    ):
        raise RefusedError("ranks and nodes contradict each other")
    if not 0 < row.size_bytes <= MOST_BYTES:
        raise RefusedError("size or time is not above 0")
    row = _with_time(row, timed)
    if not row.microseconds or row.microseconds <= 0:
        raise RefusedError("size or time is not above 0")
    try:
        carried = mapped(row).communicator.bus_gb_s
        inside = mapped(
            replace(row, n_ranks=min(row.n_ranks, 8), n_nodes=1, notes="", tool="")
        ).communicator.bus_gb_s
    except UnknownGpuError:
        raise RefusedError(f"no NCCL model of the GPU {row.gpu[:40]!r}") from None
    except UnmodelledError as error:
        raise RefusedError(str(error)) from None
    algorithm = row.size_bytes / row.microseconds / 1000
    bus = algorithm * FACTORS[name](row.n_ranks)
    if _differ(timed.bus, bus) or _differ(timed.algorithm, algorithm):
        raise RefusedError("time, size and bus bandwidth contradict one another")
    if bus > FASTEST * max(carried, inside):
        raise RefusedError("faster than its links: a time in another unit, or a size of another "
                           "message", impossible=row)
    if row.microseconds < LEAST_US:
        reason = (
            f"{row.microseconds:.3g} us, where any kernel takes at least {LEAST_US:g}: a time in "
            f"another unit"
        )
        raise RefusedError(reason, impossible=row)
    row = replace(row, bandwidth_agrees=timed.bus is not None or timed.algorithm is not None)
    if not row.bandwidth_agrees:
        _possible(row, bus=bus, carried=carried)
    return row


def _possible(row: NcclRow, *, bus: float, carried: float) -> None:
    """RefusedError for a time that no machine takes and no bandwidth beside it confirms."""
    if bus < SLOWEST * carried and row.size_bytes >= LARGE:
        reason = (
            "hardly anything of its links' bandwidth: a time in another unit, or a size of "
            "another message"
        )
        raise RefusedError(reason, impossible=row)
    usual = predict(replace(row, microseconds=None)).microseconds
    if row.microseconds is not None and row.microseconds * SLOWEST > usual:
        reason = f"{row.microseconds:.4g} us for what takes {usual:.3g} us: a time in another unit"
        raise RefusedError(f"{reason}; if it is that slow, give busbw or algbw too", impossible=row)


def _differ(said: float | None, expected: float) -> bool:
    return said is not None and abs(expected - said) > max(CONTRADICTION * expected, 0.02)


def _with_time(row: NcclRow, timed: Timed) -> NcclRow:
    """The row with its time, which where none is said follows from a bandwidth."""
    if timed.microseconds is not None:
        return replace(row, microseconds=timed.microseconds)
    said = timed.algorithm or (timed.bus or 0.0) / FACTORS[row.collective](row.n_ranks)
    if said < LEAST_GB_S:
        raise RefusedError("time_us missing or no number")
    return replace(
        row, microseconds=row.size_bytes / said / 1000,
        assumed=(*row.assumed, "the time from size and bandwidth"),
    )


def inferred(text: str, ranks: int) -> None:
    """RefusedError where a number of ranks that was inferred from bandwidths is not that of the
    row."""
    if text and abs(number(text, "n_ranks_inferred") - ranks) > CONTRADICTION * ranks:
        raise RefusedError("ranks contradict those that the bandwidths imply")


def whole(said: dict[str, str], name: str) -> int:
    """The whole number in the column `name`, also as 8.0 or 1.07e+09, as programs write a column
    with a gap; RefusedError for none."""
    text = said.get(name, "").strip()
    try:
        found = number(text, name)
    except RefusedError:
        raise RefusedError(f"{name} missing or no whole number") from None
    if found != int(found) or found >= MOST_WHOLE or not text[0].isdigit():
        raise RefusedError(f"{name} missing or no whole number")
    return int(found)


def number(text: str, name: str) -> float:
    """The number in `text`, which the column `name` holds, with as many digits as a program writes;
    RefusedError for none.

    A comma is refused here: of a time that nothing else holds to account, 1,234 could be either of
    two a thousandfold apart.
    """
    said = text.strip()
    if said.lower() in UNSAID:
        raise RefusedError(f"{name} missing or no number")
    if len(said) > LONGEST:
        raise RefusedError(f"{name}: expected a number, found {len(said):,} characters")
    try:
        found = plain_number(said)
    except ValueError:
        found = -1.0
    if not isfinite(found) or found < 0:
        raise RefusedError(f"{name}: expected a number of at least 0, found {said!r}")
    return found
