"""Predicted against measured: every row of a folder of measurements, errors by group, and pairs of
rows that differ in one thing.

A prediction that is compared with few rows says little; so errors stand by source, GPU and number
of nodes, with the worst named. Pairs ask the question that users have: is this change faster, and
by how much? It knows rows and times, and no source by name.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import StatisticsError, correlation, linear_regression, mean, median, quantiles

from zsim.calibration.data import measurements
from zsim.calibration.records import (
    Collective,
    Impossible,
    MeasurementError,
    Skipped,
    Step,
)
from zsim.calibration.row_predictions import Predicted, predictions
from zsim.io.system import parallel

MATTERS = 0.03
"""Pairs whose measured times differ by less say nothing about a sign: identical runs differ by 1 to
3 %."""
A_THIRD = 1 / 3
"""Most by which the size of a change is off where it is right, as a share of it."""
AT_ONCE = 100
"""Rows that are predicted, on all cores, between two lines of progress."""
MAX_PAIRS = 4_000_000
"""Most pairs of rows that are alike but for one field: those of 2,800 rows, compared in some
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Errors of the rows of one source, kind of row, GPU and number of nodes."""

    source: str
    kind: str
    gpu: str
    nodes: int
    n: int
    median: float
    mean: float
    p95: float
    max: float
    spearman: float | None
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Rows of one source that differ in `field` alone: how often the sign of the change is right
    where it matters, and its size.

    The `size` is the predicted change over the measured one, both as logarithms. For `ranks` it
    is the slope per doubling over the measured slope. It is within a third in the share
    `size_right`. None where no change matters.
    """

    field: str
    n: int
    sign_right: float | None
    size: float | None
    size_right: float | None
    median_error_of_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """The error of `n` steps against their share of hidden communication, by least squares.

    A slope of -0.1 says that a tenth of the hidden time is missing in the prediction.
    """

    n: int
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The whole answer."""

    rows: tuple[Predicted, ...]
    groups: tuple[Group, ...]
    pairs: tuple[Pairs, ...]
    by_hidden: Slope | None
    skipped: tuple[Skipped, ...]
    impossible: tuple[Impossible, ...] = ()
    """Rows that no link could carry, which are in nothing else."""


def accuracy(
    folder: Path, *, collective: str = "", cluster: str = "", scenarios: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Accuracy:
    """Every row of every file in `folder` predicted; `say` gets a line of progress now and then.

    `collective` and `cluster` are those of logs of nccl-tests that do not name them; scenarios of
    saved Runs are below `scenarios`. A log that
    cannot be read is skipped by name among others; a file that holds the same as another is
    counted once. TableError for a table with problems.
    """
    listed = measurements.files(folder)
    rows: list[Predicted] = []
    no_rows: list[Impossible] = []
    skipped: list[Skipped] = list(listed.skipped)
    used: dict[bytes, str] = {}
    for path, name in listed.files:
        try:
            read = measurements.rows(
                path, name=name, collective=collective, cluster=cluster, scenarios=scenarios
            )
        except MeasurementError as error:
            if folder.is_file():
                raise
            read = [Skipped(source=name, line=1, reason=f"expected {error.expected}, found "
                                                        f"{error.found}")]
        # a log's name may say its collective, and a copy's other name not
        if any(not isinstance(row, Skipped) for row in read):
            first = used.setdefault(measurements.digest(path), name)
            read = read if first == name else [measurements.copy_of(first, name=name)]
        for answers in _answers(read, name=name, say=say):
            for answer in answers:
                if isinstance(answer, Predicted):
                    rows.append(answer)
                elif isinstance(answer, Impossible):
                    no_rows.append(answer)
                else:
                    skipped.append(answer)
    return Accuracy(
        rows=tuple(rows), groups=tuple(groups(rows)), pairs=tuple(pairs(rows)),
        by_hidden=by_hidden(rows), skipped=tuple(skipped), impossible=tuple(no_rows),
    )


def _answers(
    rows: Sequence[Step | Collective | Skipped], *, name: str, say: Callable[[str], None]
) -> Iterator[list[Predicted | Skipped | Impossible]]:
    """`predictions` of each row of the file `name`, on all cores; `say` gets how many are done."""
    for begin in range(0, len(rows), AT_ONCE):
        some = rows[begin : begin + AT_ONCE]
        yield from parallel.mapped(_answer, some)
        say(f"{name}: {begin + len(some)} of {len(rows)} rows")


def _answer(row: Step | Collective | Skipped) -> list[Predicted | Skipped | Impossible]:
    return [row] if isinstance(row, Skipped) else predictions(row)


def groups(rows: Sequence[Predicted]) -> Iterable[Group]:
    """Errors by source, kind (with collective and size), GPU and number of nodes, in the order of
    first appearance."""
    by_group: dict[tuple[str, str, str, int], list[Predicted]] = defaultdict(list)
    for row in rows:
        by_group[row.source, f"{row.kind} {row.of}".strip(), row.gpu, row.nodes].append(row)
    for (source, kind, gpu, nodes), members in by_group.items():
        errors = sorted(abs(row.error) for row in members)
        yield Group(
            source=source, kind=kind, gpu=gpu, nodes=nodes, n=len(members), median=median(errors),
            mean=mean(errors), p95=percentile(errors, 95), max=errors[-1],
            spearman=spearman(
                [row.predicted for row in members], [row.measured for row in members]
            ),
            bias=median(row.error for row in members),
        )


def by_hidden(rows: Sequence[Predicted]) -> Slope | None:
    """The slope of errors against hidden communication; None where no two shares differ.

    Steps on a network that others use are left out.
    """
    steps = [row for row in rows if row.kind == "step" and not row.of]
    try:
        fit = linear_regression([row.hidden for row in steps], [row.error for row in steps])
    except StatisticsError:
        return None
    return Slope(n=len(steps), slope=fit.slope)


def percentile(values: Sequence[float], percent: int) -> float:
    """The percentile of `values`, with linear interpolation between neighbours."""
    if len(values) < 2:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of ranks, ties at their mean; None for fewer than three values or without
    any order."""
    try:
        return correlation(_ranks(first), _ranks(second)) if len(first) > 2 else None
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    """Twice the rank of each value; equal values share the middle of theirs."""
    ordered = sorted(values)
    return [float(bisect_left(ordered, value) + bisect_right(ordered, value)) for value in values]


def pairs(rows: Sequence[Predicted]) -> Iterable[Pairs]:
    """Pairs of a source's steps by the field in which they differ: a column, or several of
    `TOGETHER`.

    Collectives are left out: another size says nothing that their group does not.
    """
    ratios_by_field: dict[str, list[tuple[float, float]]] = defaultdict(list)
    by_source: dict[str, list[Predicted]] = defaultdict(list)
    for row in rows:
        if row.kind == "step":
            own = {key: text for key, text in row.fields.items() if key not in HOST_PAUSES}
            by_source[row.source].append(replace(row, fields=own))
    for members in by_source.values():
        for name in sorted({_whole(part) for row in members for part in row.fields}):
            ratios_by_field[name] += [_ratios(*pair) for pair in _differing(members, name)]
    for name, ratios in sorted(ratios_by_field.items()):
        if not ratios:
            continue
        telling = [(p, m) for p, m in ratios if abs(m - 1) > MATTERS]
        sizes = [log(p) / log(m) for p, m in telling]
        yield Pairs(
            field=name,
            n=len(ratios),
            sign_right=_share(size > 0 for size in sizes),
            size=median(sizes) if sizes else None,
            size_right=_share(abs(size - 1) <= A_THIRD for size in sizes),
            median_error_of_ratio=median(abs(p / m - 1) for p, m in ratios),
        )


def _share(right: Iterable[bool]) -> float | None:
    """The share of what is right; None of nothing."""
    known = [*right]
    return sum(known) / len(known) if known else None


TOGETHER = {
    "model": "model",
    **dict.fromkeys(
        ("cluster.nodes", "cluster.ranks", "strategy.dp_shard", "strategy.dp_replicate"), "ranks"
    ),
}
"""Columns, or the tables that they are of, which change together and are one field of a pair."""
HOST_PAUSES = (
    "execution.step_overhead", "execution.micro_batch_overhead", "execution.issue_kernel"
)
"""Columns of what a trainer's host does, which follow from the others."""


def _whole(part: str) -> str:
    """The field of which the column `part` is one."""
    return TOGETHER.get(part) or TOGETHER.get(part.partition(".")[0], part)


def _differing(rows: Sequence[Predicted], name: str) -> Iterator[tuple[Predicted, Predicted]]:
    """The rows that differ in the field `name` and in nothing else, two by two in their order.

    Where thousands are alike in all else, which would be millions of pairs, each is held against
    the next ones only.
    """
    alike: dict[frozenset[tuple[str, str]], list[Predicted]] = defaultdict(list)
    for row in rows:
        alike[frozenset(item for item in row.fields.items() if _whole(item[0]) != name)].append(row)
    for members in alike.values():
        own = [
            sorted(item for item in row.fields.items() if _whole(item[0]) == name)
            for row in members
        ]
        next_ones = (
            len(members) if len(members) ** 2 <= 2 * MAX_PAIRS else MAX_PAIRS // len(members)
        )
        for index, first in enumerate(members):
            for other in range(index + 1, min(len(members), index + 1 + next_ones)):
                if own[other] != own[index]:
                    yield first, members[other]


def _ratios(first: Predicted, second: Predicted) -> tuple[float, float]:
    """Time per token of the second row over that of the first, predicted and measured."""
    return (second.predicted / second.per) / (first.predicted / first.per), (
        second.measured / second.per
    ) / (first.measured / first.per)
