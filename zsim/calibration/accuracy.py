"""Predicted against measured: every row of a folder of measurements, errors by group, and pairs of
rows that differ in one thing.

A prediction that is compared with few rows says little; so errors stand by source, GPU and number
of nodes, with the worst named. Pairs ask the question that users have: is this change faster, and
by how much? It knows rows and times, and no source by name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log
from pathlib import Path
from statistics import mean, median

from zsim.calibration import memory_pressure, tables
from zsim.calibration.memory_pressure import Caution
from zsim.calibration.nccl_tests.error_table import size_of
from zsim.calibration.nccl_tests.hardware_words import is_shared
from zsim.calibration.nccl_tests.rows import predict as predict_collective
from zsim.calibration.nccl_tests.rows import question
from zsim.calibration.rows import shared_network
from zsim.calibration.tables import NcclRow, Product, Row, Skipped, Step
from zsim.engine.costs import Costs
from zsim.engine.error_bands import parts
from zsim.engine.step import simulate_step
from zsim.errors import ZsimError
from zsim.scenario import scenario
from zsim.scenario.plan import plan

MATTERS = 0.05
"""Pairs whose measured times differ by less say nothing about a sign: identical runs differ by 1 to
3 %."""
MAX_PAIRS = 4_000_000
"""Of rows that are alike but for one field: those of 2,800 rows, which take some seconds to
compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One row: seconds predicted and measured, the band of the prediction as factors, and what the
    mapping assumed."""

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
    """What a pair divides times by, so that more work is not taken for a slower machine: a step's
    tokens."""
    of: str = ""
    """What rows of its kind are grouped by besides: a collective and its size, a product's dtype.
    """

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
class Accuracy:
    """The whole answer."""

    rows: tuple[Predicted, ...]
    groups: tuple[Group, ...]
    pairs: tuple[Pairs, ...]
    skipped: tuple[Skipped, ...]


def accuracy(
    folder: Path, *, collective: str = "", say: Callable[[str], None] = lambda _: None
) -> Accuracy:
    """Every row of every file in `folder` predicted; `say` gets a line of progress now and then.

    A damaged file among others is skipped by name, and so is one that holds the same as another
    that was read: measurements count once. One that is given by itself is a MeasurementError.
    `collective` is what logs of nccl-tests ran that do not say it.
    """
    listed = tables.files(folder)
    rows: list[Predicted] = []
    skipped: list[Skipped] = list(listed.skipped)
    used: dict[bytes, str] = {}
    for path, name in listed.files:
        read = tables.rows if folder.is_file() else tables.readable
        found = read(path, name=name, collective=collective)
        # a name may say what makes rows usable, and a copy's other name not
        if any(not isinstance(row, Skipped) for row in found):
            first = used.setdefault(tables.digest(path), name)
            found = found if first == name else [tables.copy_of(first, name=name)]
        for count, row in enumerate(found, start=1):
            one = row if isinstance(row, Skipped) else predict_row(row)
            if isinstance(one, Predicted):
                rows.append(one)
            else:
                skipped.append(one)
            if count % 20 == 0:
                say(f"{name}: {count} of {len(found)} rows")
    return Accuracy(
        rows=tuple(rows), groups=tuple(groups(rows)), pairs=tuple(pairs(rows)),
        skipped=tuple(skipped),
    )


def predict_row(row: Row) -> Predicted | Skipped:
    """A row of any kind, predicted; skipped by name where its figures lead to no number, so that
    one row never ends a folder."""
    try:
        if isinstance(row, Step):
            return predict(row)
        return predicted_collective(row) if isinstance(row, NcclRow) else predicted_product(row)
    except (ArithmeticError, ValueError) as error:
        return Skipped(source=row.source, line=row.line, reason=f"no arithmetic can be done with "
                                                                f"its figures: {error}")


def predicted_collective(row: NcclRow) -> Predicted:
    """A collective as NCCL's model has it, which does not see the measured time; rows of shared
    networks are groups of their own."""
    found = predict_collective(question(row))
    shared = ", shared network" if is_shared(row.inter_node) else ""
    return Predicted(
        source=row.source, line=row.line, kind="collective",
        of=f"{row.collective} {size_of(row.size_bytes)}{shared}", gpu=row.gpu, nodes=row.n_nodes,
        predicted=found.microseconds / 1e6, measured=(row.microseconds or 0) / 1e6,
        band=(found.low / found.microseconds, found.high / found.microseconds),
        assumed=found.assumed,
        fields={
            "collective": row.collective, "gpu": row.gpu, "ranks": str(row.n_ranks),
            "bytes": str(row.size_bytes),
        },
    )


def predicted_product(row: Product) -> Predicted:
    """One matrix product on a device that does nothing else."""
    return Predicted(
        source=row.source,
        line=row.line,
        kind="product",
        of=row.dtype,
        gpu=row.gpu,
        nodes=1,
        predicted=row.predicted_s,
        measured=row.seconds,
        band=row.band,
        assumed=row.assumed,
        fields=row.fields,
    )


def predict(step: Step) -> Predicted | Skipped:
    """The step simulated; skipped by name where its scenario cannot be."""
    where = f"{step.source} line {step.line}"
    try:
        main, *others = (
            _simulated(text, where, shared=step.shared) for text in (step.scenario, *step.otherwise)
        )
    except ZsimError as error:
        return Skipped(source=step.source, line=step.line, reason=str(error))
    low, high = (
        edge(one.factors[side] * one.seconds for one in (main, *others))
        for side, edge in enumerate((min, max))
    )
    wider, longer = step.widened, step.widened
    for caution in main.cautions:
        wider, longer = hypot(wider, caution.wider), hypot(longer, caution.longer)
    return Predicted(
        source=step.source,
        line=step.line,
        kind="step",
        gpu=step.gpu,
        nodes=step.nodes,
        predicted=main.seconds,
        measured=step.seconds,
        band=(low / main.seconds / (1 + wider), high / main.seconds * (1 + longer)),
        assumed=(*step.assumed, *(caution.words for caution in main.cautions)),
        fields=step.fields,
        per=step.tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulated:
    """Seconds of one scenario, the factors around them, and what its device's memory makes of them.
    """

    seconds: float
    factors: tuple[float, float]
    cautions: tuple[Caution, ...]


def _simulated(text: str, where: str, *, shared: bool) -> _Simulated:
    asked = scenario.parse(text.encode(), where=where)
    costs = Costs(cluster=asked.cluster, execution=asked.executed)
    program = plan(asked, device=asked.cluster.kind)
    timeline = simulate_step(program, costs=costs)
    found = parts(program, timeline, costs=costs)
    factors = found.on_shared_network(*shared_network.BAND) if shared else found.factors
    return _Simulated(
        seconds=timeline.step_time_ns / 1e9, factors=factors,
        cautions=memory_pressure.cautions(program, asked),
    )


def cautions(step: Step) -> tuple[str, ...]:
    """What is to be known of a step's prediction before it is made, or why there is none."""
    try:
        asked = scenario.parse(step.scenario.encode(), where=f"{step.source} line {step.line}")
        return tuple(
            caution.words
            for caution in memory_pressure.cautions(plan(asked, device=asked.cluster.kind), asked)
        )
    except ZsimError as error:
        return (" ".join(f"not predicted: {error}".split()),)


def groups(rows: Sequence[Predicted]) -> Iterable[Group]:
    """By source, kind (with collective and size), GPU and number of nodes, in the order of first
    appearance."""
    found: dict[tuple[str, str, str, int], list[Predicted]] = defaultdict(list)
    for row in rows:
        found[row.source, f"{row.kind} {row.of}".strip(), row.gpu, row.nodes].append(row)
    for (source, kind, gpu, nodes), members in found.items():
        errors = sorted(abs(row.error) for row in members)
        yield Group(
            source=source, kind=kind, gpu=gpu, nodes=nodes, n=len(members), median=median(errors),
            mean=mean(errors), p95=percentile(errors, 0.95), max=errors[-1],
            spearman=spearman(
                [row.predicted for row in members], [row.measured for row in members]
            ),
            bias=median(row.error for row in members),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, with linear interpolation between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of ranks, ties at their mean; None for fewer than three values or without any
    order."""
    if len(first) < 3:
        return None
    one, other = _ranks(first), _ranks(second)
    middle = (len(first) - 1) / 2
    spread = [sum((rank - middle) ** 2 for rank in ranks) for ranks in (one, other)]
    if not all(spread):
        return None
    together = sum((a - middle) * (b - middle) for a, b in zip(one, other, strict=True))
    return float(together / (spread[0] * spread[1]) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    """Of each value its place in their order; equal ones share the middle of theirs, which is
    worked out once for all of them."""
    middles, before = dict[float, float](), 0
    for value, count in sorted(Counter(values).items()):
        middles[value] = before + (count - 1) / 2
        before += count
    return [middles[value] for value in values]


def pairs(rows: Sequence[Predicted]) -> Iterable[Pairs]:
    """By the one field in which two steps of a source differ, of which names behind a dot are
    parts.

    A collective of another size says nothing that its group does not.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    by_source: dict[str, list[Predicted]] = defaultdict(list)
    for row in rows:
        if row.kind == "step":
            by_source[row.source].append(row)
    for members in by_source.values():
        for name in sorted({_whole(part) for row in members for part in row.fields}):
            found[name] += [_ratios(first, second) for first, second in _differing(members, name)]
    for name, ratios in sorted(found.items()):
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


def _whole(part: str) -> str:
    """The field of which `part` is one."""
    return part.partition(".")[0]


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
        for place, first in enumerate(members):
            for other in range(place + 1, min(len(members), place + 1 + next_ones)):
                if own[other] != own[place]:
                    yield first, members[other]


def _ratios(first: Predicted, second: Predicted) -> tuple[float, float]:
    """How many times as long as the first row the second takes for a token, predicted and measured.
    """
    return (second.predicted / second.per) / (first.predicted / first.per), (
        second.measured / second.per
    ) / (first.measured / first.per)
