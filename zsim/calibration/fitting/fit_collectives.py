"""Curves of collectives from measurements: floor, share of the bandwidth, what middle sizes add and
from which size on.

A curve is of one collective on rings of a node, in its switch or over its network. Its prior is the
published curve, as wide as systems of one generation differ, so that few rows move it little.
Errors count by their logarithm, and outliers count less (soft L1). The fit needs scipy.

The held-out error is that of each system of each file, predicted by the other systems and the
published curve. Rows that the published curve was itself fitted to are not wholly unseen by it;
`tests.published.nccl_left_out` predicts those without their source.

A curve's band holds the held-out errors. A system measured alone has none but the distance to the
published curve, by which a machine in need of calibration would be trusted least. Every fourth of
its sizes is left out in turn instead. Over a network those say nothing of other numbers of nodes.
The band there is no narrower than the published curve's, or than the held-out error if that is
less.

NCCL's own choice in a node with a switch is fitted on the switch's curve, and goes by that alone
from then on. The simulator otherwise takes the faster of switch and ring. The published ring, which
no row of the machine tests, would then hold a slower machine's times to its own. Rows of a forced
ring have their own curve, and say nothing of NCCL's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any, Literal

from zsim.calibration import impossible
from zsim.calibration.collectives import group_of, predict
from zsim.calibration.fitting.fit_steps import solver
from zsim.calibration.records import Collective, Skipped
from zsim.cluster.collectives.nccl.bands import LARGE, MIDDLE, CurveBand
from zsim.cluster.collectives.nccl.curves import CURVES, Curves
from zsim.cluster.collectives.nccl.estimate import algorithms
from zsim.cluster.collectives.nccl.measured_curves import as_it_is, with_curve
from zsim.cluster.links import MeasuredCurve, Nccl

NOISE = 0.03
"""Share by which repeated nccl-tests runs of one system differ at middle sizes. Below 1 MiB it is
10 % and more, which soft L1 bears."""
WIDTHS = {"floor": 0.3, "share": 0.04, "added": 0.5, "half": 0.7}
"""Widths of the priors, as logarithms, from published tables.

Floors of one fabric are 46 to 68 µs, and large messages of one generation within 4 %. Middle sizes
of three sources of A100 are up to 40 % apart, half sizes 16 to 32 MiB on one machine.
"""
STEP = 0.01
"""Share by which a constant is moved for the slope of a prediction."""
NARROWEST = CurveBand(large=0.05, middle=0.05, small=0.1)
"""Least half-widths of a curve's bands: a system differs so from day to day, small messages from
run to run."""
WIDEST = 0.9
"""Beyond which a band's lower end says nothing."""
STUDENT = {3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83}
"""Within so many root mean squares of few normal errors lies the next one, nine times of ten."""
FOLDS = 4
"""Folds of the sizes of a system that is alone: every fourth is left out."""
ALONE = ", by which alone NCCL's own choice in a node goes, without the published ring"
"""Note in the source of a switch's curve."""
Key = tuple[str, str]
Size = Literal["large", "middle", "small"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCurves:
    """The curves, and of each row used its curve, its system, and its error: fitted, and with its
    system left out."""

    node: Nccl
    curves: tuple[MeasuredCurve, ...]
    rows: tuple[Collective, ...]
    keys: tuple[Key, ...]
    groups: tuple[str, ...]
    errors: tuple[float, ...]
    left_out: tuple[float, ...]
    before: tuple[str, ...]
    """Source of the published curve for each row whose system is alone on its curve, else "".

    The published curve predicts such a row when its system is left out.
    """


def usable(
    rows: Iterable[Collective], node: Nccl
) -> tuple[list[Collective], list[Skipped]]:
    """The rows measured on such a node's GPUs, links and network; others are skipped by name."""
    kept: list[Collective] = []
    skipped: list[Skipped] = []
    for row in rows:
        if reason := _other(row, node):
            skipped.append(Skipped(source=row.source, line=row.line, reason=reason))
        else:
            kept.append(row)
    return kept, skipped


def _other(row: Collective, node: Nccl) -> str:
    """The reason why a row says nothing of such nodes; "" where it does."""
    group = group_of(row)
    if row.is_shared:
        return "others used the network: congestion, not the cluster"
    if impossible.of_collective(row) is not None:
        return "faster than its links can be: another time, size or network than it says"
    if group.generation != node.generation or group.links != node.links:
        return (
            f"{group.generation} on {group.links}: another machine than the cluster's "
            f"{node.generation} on {node.links}"
        )
    if group.num_nodes > 1 and group.fabric != node.fabric:
        return f"network {group.fabric}: another than the cluster's {node.fabric}"
    if group.links == "pcie":
        return "rings over PCIe have no curve"
    if row.op == "broadcast":
        return "a broadcast has no curve"
    return ""


def _system(row: Collective) -> str:
    """The machine that a row was measured on, which is left out as a whole."""
    cluster, nodes = row.cluster, row.cluster.num_nodes
    if row.group:
        return f"{row.source}, {row.group}"
    return f"{row.source}, {cluster.device.name}, {cluster.num_ranks} ranks on {nodes} nodes"


def fit(rows: Sequence[Collective], node: Nccl, *, source: str) -> FittedCurves:
    """The curves that meet `rows` best, one for each that some row runs on."""
    keys = [_key(row) for row in rows]
    groups = [_system(row) for row in rows]
    curves, errors, left_out, before = (
        CURVES, [0.0] * len(rows), [0.0] * len(rows), [""] * len(rows),
    )
    moved: list[MeasuredCurve] = []
    for key in sorted(set(keys)):
        indices = [index for index, own in enumerate(keys) if own == key]
        curve = _fitted([rows[index] for index in indices], key, node)
        systems = sorted({groups[index] for index in indices})
        for group in systems:
            apart = [rows[index] for index in indices if groups[index] != group]
            others = _fitted(apart, key, node)
            for index in indices:
                if groups[index] == group:
                    before[index] = "" if apart else others.source
                    left_out[index] = (
                        exp(
                            _error(
                                rows[index], with_curve(CURVES, others, node) if apart else CURVES
                            )
                        )
                        - 1
                    )
        band = _band(
            [rows[index] for index in indices], [left_out[index] for index in indices], key, node,
            alone=len(systems) == 1,
        )
        origin = (
            f"{len(indices)} rows of {source}{ALONE if key[0] == 'nvls' else ''}; before: "
            f"{curve.source}"
        )
        moved.append(
            replace(
                curve, band=band.large, band_middle=band.middle, band_small=band.small,
                provenance="calibrated", source=origin,
            )
        )
        curves = with_curve(curves, moved[-1], node)
    for index, row in enumerate(rows):
        errors[index] = exp(_error(row, curves)) - 1
    return FittedCurves(
        node=node,
        curves=tuple(moved),
        rows=tuple(rows),
        keys=tuple(keys),
        groups=tuple(groups),
        errors=tuple(errors),
        left_out=tuple(left_out),
        before=tuple(before),
    )


def _band(
    rows: Sequence[Collective], missed: Sequence[float], key: Key, node: Nccl, *, alone: bool
) -> CurveBand:
    """Half-widths of a curve for large, middle and small messages: the published one's where no row
    is of the size.

    `missed` are the errors of rows whose system is left out: of one that is `alone`, the errors of
    the published curve.
    """
    sizes = sorted({row.nbytes for row in rows})
    unseen = _sizes_left_out(rows, sizes, key, node) if alone and len(sizes) >= FOLDS else missed
    published = _published_band(key, node)

    def width(size: Size) -> float:
        indices = [index for index, row in enumerate(rows) if _size(row.nbytes) == size]
        most: float = getattr(published, size)
        if not indices:
            return most
        least: list[float] = [
            getattr(NARROWEST, size),
            _expected([unseen[index] for index in indices], published=most),
        ]
        if alone and key[0] == "network":
            least.append(min(most, _most([missed[index] for index in indices])))
        return min(WIDEST, max(least))

    return CurveBand(large=width("large"), middle=width("middle"), small=width("small"))


def _published_band(key: Key, node: Nccl) -> CurveBand:
    curve = as_it_is(CURVES, *key, node)
    assert curve is not None  # some row was predicted on it
    return CurveBand(large=curve.band, middle=curve.band_middle, small=curve.band_small)


def _sizes_left_out(
    rows: Sequence[Collective], sizes: Sequence[int], key: Key, node: Nccl
) -> list[float]:
    """The errors of the rows of one system, each predicted by those of other sizes."""
    errors = [0.0] * len(rows)
    for fold in range(FOLDS):
        out = set(sizes[fold::FOLDS])
        curves = with_curve(
            CURVES, _fitted([row for row in rows if row.nbytes not in out], key, node), node
        )
        for index, row in enumerate(rows):
            if row.nbytes in out:
                errors[index] = exp(_error(row, curves)) - 1
    return errors


def _size(nbytes: int) -> Size:
    return "large" if nbytes >= LARGE else "middle" if nbytes >= MIDDLE else "small"


def _expected(errors: Sequence[float], *, published: float) -> float:
    """Half-width in which nine of ten further rows lie: the 95th percentile of `errors`.

    Few errors may be small by chance: Student's t widens their root mean square. One or two are
    worth no less than the published band.
    """
    times = STUDENT.get(len(errors), 0.0)
    wide = (
        times * (sum(error**2 for error in errors) / len(errors)) ** 0.5
        if len(errors) > 2
        else published
    )
    return max(_most(errors), wide)


def _most(errors: Sequence[float]) -> float:
    """The 95th percentile of the absolute errors."""
    far = sorted(map(abs, errors))
    return far[min(len(far) - 1, int(0.95 * len(far)))]


def _key(row: Collective) -> Key:
    """The curve that the row's time is on."""
    communicator = group_of(row)
    if communicator.num_nodes > 1:
        return "network", row.op
    if communicator.algorithm in (None, "nvls") and "nvls" in algorithms(
        row.op, communicator
    ):
        return "nvls", row.op
    return "ring", row.op


def _error(row: Collective, curves: Curves) -> float:
    """The logarithm of predicted over measured."""
    return log(predict(row, curves=curves).microseconds / (1e6 * row.seconds))


def _fitted(rows: Sequence[Collective], key: Key, node: Nccl) -> MeasuredCurve:
    """The curve at `key` moved to meet `rows`; as it was for none."""
    start = as_it_is(CURVES, *key, node)
    assert start is not None  # some row was predicted on it
    if not rows:
        return start
    widths = list(WIDTHS.values()) if start.added else [WIDTHS["floor"], WIDTHS["share"]]

    def residuals(at: Any) -> list[float]:
        moved = with_curve(CURVES, _moved(start, at), node)
        return [_error(row, moved) / NOISE for row in rows] + [
            (float(value) - 1) / width for value, width in zip(at, widths, strict=True)
        ]

    return _moved(start, solver()(residuals, [1.0] * len(widths), loss="soft_l1", diff_step=STEP).x)


def _moved(start: MeasuredCurve, at: Any) -> MeasuredCurve:
    """`start` with floor, share, what is added and its half sizes multiplied by the exponentials of
    `at` less 1.

    Less 1 because the solver's steps are in proportion to where it stands, and bytes are whole:
    from 0 it would see no slope.
    """
    factors = [exp(max(-5.0, min(5.0, float(value) - 1))) for value in at] + [1.0, 1.0]
    floor, share, added, half = factors[:4]
    terms = tuple((times * added, max(1, round(size * half))) for times, size in start.added)
    return replace(start, floor=start.floor * floor, share=start.share * share, added=terms)
