"""Predicted against measured: every row of a folder of measurements, errors by group, and pairs of
rows that differ in one thing.

A prediction that is compared with few rows says little; so errors stand by source, GPU and number
of nodes, with the worst named. Pairs ask the question that users have: is this change faster, and
by how much? It knows rows and times, and no source by name.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, log
from pathlib import Path
from statistics import StatisticsError, correlation, linear_regression, mean, median, quantiles
from typing import Literal

from zsim.calibration import collectives, impossible, memory_pressure
from zsim.calibration.data import measurements
from zsim.calibration.data.records import (
    Collective,
    Impossible,
    MeasurementError,
    Skipped,
    Step,
    middle,
)
from zsim.cluster.collectives.nccl.bands import LARGE, MIDDLE
from zsim.engine.costs import Costs
from zsim.engine.error_bands import step_shares
from zsim.engine.simulate_step import simulate_step
from zsim.errors import ZsimError
from zsim.io import parallel
from zsim.ir.program import Program
from zsim.memory import fits
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

MATTERS = 0.03
"""Pairs whose measured times differ by less say nothing about a sign: identical runs differ by 1 to
3 %."""
AT_ONCE = 100
"""Rows that are predicted, on all cores, between two lines of progress."""
MAX_PAIRS = 4_000_000
"""Most pairs of rows that are alike but for one field: those of 2,800 rows, compared in some
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One row: seconds predicted and measured, the band of the prediction as factors, and what the
    row leaves open."""

    source: str
    line: int
    kind: str
    gpu: str
    nodes: int
    predicted: float
    measured: float
    band: tuple[float, float]
    assumed: tuple[str, ...]
    fields: Mapping[str, str]
    per: float = 1.0
    """Tokens of a step, by which pairs divide times: more work is no slower machine."""
    of: str = ""
    """Further key of its group: the collective and its size, or the table's `group`."""
    unit: Literal["s", "B"] = "s"
    """Unit of `predicted` and `measured`: seconds, or bytes of a peak."""
    hidden: float = 0.0
    """Share of the predicted step in which compute hides communication."""

    @property
    def error(self) -> float:
        """Relative: above 0 predicted too slow."""
        return self.predicted / self.measured - 1


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
    where it matters, and its size."""

    field: str
    n: int
    sign_right: float | None
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


def predictions(row: Step | Collective) -> list[Predicted | Skipped | Impossible]:
    """A row's time and peaks predicted, or the reason why the row is skipped or impossible.

    Rows are skipped where the simulator refuses the scenario or an arithmetic error occurs, so that
    one row never ends a folder.
    """
    if isinstance(row, Step) and row.simulated:
        return [Skipped(source=row.source, line=row.line, reason="simulated, not measured")]
    try:
        return [of_collective(row)] if isinstance(row, Collective) else [*of_step(row)]
    except (ZsimError, ArithmeticError, ValueError) as error:
        return [Skipped(source=row.source, line=row.line, reason=str(error))]


Size = Literal["large", "middle", "small"]


def size_of(nbytes: int) -> Size:
    """The size of a message: large from 64 MiB, middle from 1 MiB, small below."""
    return "large" if nbytes >= LARGE else "middle" if nbytes >= MIDDLE else "small"


def of_collective(row: Collective) -> Predicted | Impossible:
    """A collective by NCCL's model, unless its links could not carry it."""
    if (no_row := impossible.of_collective(row)) is not None:
        return no_row
    answer = collectives.predict(row)
    low, high = (end / answer.microseconds for end in (answer.low, answer.high))
    return Predicted(
        source=row.source, line=row.line, kind="collective",
        of=", ".join(filter(None, (f"{row.op} {size_of(row.nbytes)}", row.group))),
        gpu=row.cluster.device.name, nodes=row.cluster.num_nodes,
        predicted=answer.microseconds / 1e6, measured=row.seconds, band=(low, high),
        assumed=tuple(caveat.text for caveat in row.caveats),
        fields={
            "collective": row.op, "cluster": row.cluster.name,
            "ranks": str(row.cluster.num_ranks), "bytes": str(row.nbytes),
        },
    )


def of_step(step: Step) -> Iterator[Predicted | Impossible]:
    """A step's time simulated, and the peaks of its memory; ZsimError where it cannot be."""
    programs = [plan(each, device=each.cluster.kind) for each in step.readings]
    if (no_row := impossible.of_step(step, programs)) is not None:
        yield no_row
        return
    if step.seconds is not None:
        yield _timed(step, step.seconds, programs)
    answers = [
        fits.assess_program(
            program, each.cluster, expandable_segments=each.expandable_segments
        )
        for each, program in zip(step.readings, programs, strict=True) if step.peaks
    ]
    for name, nbytes in step.peaks.items():
        sizes = [
            {"allocated": answer.allocated_bytes, "reserved": answer.reserved_bytes}[name]
            for answer in answers
        ]
        size = round(middle(sizes))
        low = min(1.0, min(answer.allocated_bytes for answer in answers) / size)
        yield _predicted(
            step, kind="peak", of=name, unit="B", predicted=size, measured=nbytes,
            band=(low / (1 + step.widened), max(sizes) / size * (1 + step.widened)),
        )


def _timed(step: Step, measured: float, programs: Sequence[Program]) -> Predicted:
    """The middle of what the readings of a row come to; its band holds the bands of all."""
    times = [
        _reading(step, each, program)
        for each, program in zip(step.readings, programs, strict=True)
    ]
    predicted = middle(each.seconds for each in times)
    texts = dict.fromkeys(text for each in times for text in each.caveats)
    return _predicted(
        step, kind="step", predicted=predicted, measured=measured,
        band=(
            min(each.low for each in times) / predicted,
            max(each.high for each in times) / predicted,
        ),
        assumed=tuple(texts), per=step.tokens, hidden=middle(each.hidden for each in times),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The seconds of one scenario that a row may have been, with the ends of its band."""

    seconds: float
    low: float
    high: float
    hidden: float
    caveats: tuple[str, ...]


def _reading(step: Step, scenario: Scenario, program: Program) -> _Reading:
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    timeline = simulate_step(program, costs=costs)
    shares = step_shares(program, timeline, costs=costs)
    low, high = shares.on_shared_network(*step.network) if step.is_shared else shares.factors
    caveats = memory_pressure.caveats(program, scenario.cluster)
    wider = hypot(step.widened, *(caveat.widens for caveat in caveats))
    longer = hypot(wider, *(caveat.longer for caveat in caveats))
    seconds = timeline.step_time_ns / 1e9
    return _Reading(
        seconds=seconds, low=seconds * low / (1 + wider), high=seconds * high * (1 + longer),
        hidden=shares.hidden,
        caveats=tuple(caveat.text for caveat in caveats),
    )


def _predicted(
    step: Step, *, kind: str, predicted: float, measured: float, band: tuple[float, float],
    assumed: tuple[str, ...] = (), of: str = "", unit: Literal["s", "B"] = "s", per: float = 1.0,
    hidden: float = 0.0,
) -> Predicted:
    cluster = step.scenario.cluster
    return Predicted(
        source=step.source, line=step.line, kind=kind, of=", ".join(filter(None, (of, step.group))),
        gpu=cluster.device.name, nodes=cluster.num_nodes, predicted=predicted, measured=measured,
        band=band, assumed=(*(caveat.text for caveat in step.caveats), *assumed),
        fields=step.fields, per=per, unit=unit, hidden=hidden,
    )


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
        right = sum(log(p) * log(m) > 0 for p, m in telling)
        yield Pairs(
            field=name,
            n=len(ratios),
            sign_right=right / len(telling) if telling else None,
            median_error_of_ratio=median(abs(p / m - 1) for p, m in ratios),
        )


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
