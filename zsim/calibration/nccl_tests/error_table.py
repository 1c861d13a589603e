"""The error table of nccl predictions: by collective, by system and by size, large, middle and
small messages apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median
from typing import Literal

from zsim.calibration.nccl_tests.hardware_words import is_shared
from zsim.calibration.nccl_tests.rows import NcclRow, Prediction, predict, question
from zsim.cluster.collectives.nccl.curves import LARGE, MIDDLE

Size = Literal["large", "middle", "small"]
TARGETS: dict[Size, float] = {"large": 0.05, "middle": 0.10, "small": 0.20}
"""Median errors asked for: from 64 MiB, from 1 MiB, and below."""


def size_of(nbytes: int) -> Size:
    """Which of the three sizes a message of `nbytes` is."""
    return "large" if nbytes >= LARGE else "middle" if nbytes >= MIDDLE else "small"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row, what was predicted without looking at its time, and predicted over measured less 1."""

    row: NcclRow
    prediction: Prediction
    error: float

    @property
    def size(self) -> Size:
        """Which of the three sizes."""
        return size_of(self.row.size_bytes)

    @property
    def group(self) -> str:
        """The system that was measured, as the source names it; shared networks are groups of their
        own."""
        row = self.row
        shared = ", shared network" if is_shared(row.inter_node) else ""
        return (
            f"{row.gpu.partition('(per plot')[0].strip()} {row.n_nodes} x "
            f"{row.n_ranks // row.n_nodes}{shared}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of one group: absolute errors as shares of the measurement, the bias, and how many
    measurements lie in their band."""

    collective: str
    group: str
    size: str
    n: int
    median: float
    mean: float
    p95: float
    max: float
    bias: float
    in_band: float


def score(
    rows: Iterable[NcclRow], *, predictor: Callable[[NcclRow], Prediction] = predict
) -> tuple[Scored, ...]:
    """Each row that has a time, predicted; `predictor` never sees the time."""
    found = []
    for row in rows:
        if row.microseconds is not None:
            prediction = predictor(question(row))
            found.append(
                Scored(
                    row=row, prediction=prediction,
                    error=prediction.microseconds / row.microseconds - 1,
                )
            )
    return tuple(found)


def table(scored: Iterable[Scored]) -> tuple[Errors, ...]:
    """One line per collective, system and size, then one per collective and size over all systems
    but shared networks."""
    lines: dict[tuple[str, str, str], list[Scored]] = {}
    for one in scored:
        lines.setdefault((one.row.collective, one.group, one.size), []).append(one)
        if not one.group.endswith("shared network"):
            lines.setdefault((one.row.collective, "all", one.size), []).append(one)
    return tuple(_errors(*key, lines[key]) for key in sorted(lines))


def _errors(collective: str, group: str, size: str, scored: list[Scored]) -> Errors:
    sizes = sorted(abs(one.error) for one in scored)
    inside = sum(
        one.prediction.low <= (one.row.microseconds or 0) <= one.prediction.high for one in scored
    )
    return Errors(
        collective=collective,
        group=group,
        size=size,
        n=len(scored),
        median=median(sizes),
        mean=fmean(sizes),
        p95=sizes[max(0, ceil(0.95 * len(sizes)) - 1)],
        max=sizes[-1],
        bias=median(one.error for one in scored),
        in_band=inside / len(scored),
    )
