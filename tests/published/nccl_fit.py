"""Constants of NCCL's mechanisms fitted to single nodes, all of them or without a part:
`python -m tests.published.nccl_fit` prints what `zsim.cluster.collectives.nccl.constants` has
rounded.

A launch is one for all generations, times one for each. So a generation without measurements has
what the others have in common. Rows between nodes have no part in the fit. Sources count alike,
whatever their number of rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from typing import Any

from tests.published.convert import TABLES
from zsim.calibration.collectives import group_of
from zsim.calibration.data import table
from zsim.calibration.fitting.fit_steps import solver
from zsim.calibration.records import Collective
from zsim.calibration.row_predictions import size_of
from zsim.cluster.collectives.nccl import durations
from zsim.cluster.collectives.nccl.algorithms import algorithms
from zsim.cluster.collectives.nccl.channel_search import RINGS_IN_NODE
from zsim.cluster.collectives.nccl.communicator import Communicator
from zsim.cluster.collectives.nccl.constants import CONSTANTS, TORCH_US, Constants
from zsim.cluster.collectives.nccl.tuner import GENERATIONS
from zsim.cluster.links import Generation

NOISE = {"large": 0.05, "middle": 0.12, "small": 0.2}
"""Shares by which sources of one machine differ, by size."""
WEIGHT = 8
"""Rows that a source counts as, for each collective and size that it has."""
AZURE: dict[str, tuple[Generation, float, float, int, float]] = {
    "NDv4, A100": ("ampere", 42, 270, 32, 0.98 * 240), "NDv5, H100": ("hopper", 30, 70, 16, 475.8),
    "NDv5, H200": ("hopper", 30, 70, 32, 475.8),
}
"""All-reduces of 8 GPUs as published: µs, further µs and the MiB at which half of them are there,
GB/s of bus bandwidth."""
AZURE_SIZES = tuple(1 << power for power in (16, 18, 20, 22, 24, 26, 28, 30, 33))
STEP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePoint:
    """One measured time of a single node."""

    op: str
    nbytes: int
    microseconds: float
    group: Communicator
    source: str


@dataclass(frozen=True, slots=True)
class FreeConstant:
    """A constant that is fitted: its value before, and the width of its prior as a logarithm."""

    name: str
    generation: Generation | None
    before: float
    width: float


COMMON = FreeConstant("launch_us", None, 18.0, 1.0)
PARAMETERS = (
    COMMON, *(FreeConstant("launch_us", each, 1.0, 0.4) for each in GENERATIONS),
    FreeConstant("idle", None, 0.3, 0.7),
)
"""All that is fitted. What links reach is known without these rows."""


def source_of(row: Collective) -> str:
    """The repository in which a row was published."""
    return row.origin.replace(":", " ").split()[0]


def points() -> Iterator[NodePoint]:
    """All published times of single nodes that nothing else used, and Azure's sums."""
    for path in sorted(TABLES.glob("nccl_*.csv")):
        for row in table.read(path):
            if isinstance(row, Collective) and not row.group and row.cluster.num_nodes == 1:
                torch = TORCH_US if row.through_torch else 0.0
                yield NodePoint(
                    op=row.op, nbytes=row.nbytes, microseconds=1e6 * row.seconds - torch,
                    group=group_of(row), source=source_of(row),
                )
    for generation, least, added, half, bus in AZURE.values():
        counted, rate = RINGS_IN_NODE[generation]
        group = Communicator(
            generation=generation, num_ranks=8, num_nodes=1, bus_gb_s=counted * rate
        )
        for nbytes in AZURE_SIZES:
            wire = 1.75 * nbytes / (1000 * bus)
            yield NodePoint(
                op="all_reduce", nbytes=nbytes, group=group, source="Azure",
                microseconds=least + wire + added * nbytes / (nbytes + (half << 20)),
            )


def fit(is_left_out: Callable[[NodePoint], bool] = lambda _: False) -> Constants:
    """The constants that meet all points best but those left out."""
    used = [point for point in points() if not is_left_out(point)]
    members = Counter(map(_kind, used))
    weights = [(WEIGHT / members[_kind(point)]) ** 0.5 for point in used]

    def residuals(at: Any) -> list[float]:
        constants = _constants([exp(value - 1) for value in at])
        return [
            *(
                weight * log(time_us(point, constants) / point.microseconds)
                / NOISE[size_of(point.nbytes)]
                for point, weight in zip(used, weights, strict=True)
            ),
            *((value - 1) / each.width for value, each in zip(at, PARAMETERS, strict=True)),
        ]

    # from 1, because the solver's steps are in proportion to where it stands
    best = solver()(residuals, [1.0] * len(PARAMETERS), loss="soft_l1", diff_step=STEP).x
    return _rounded(_constants([exp(value - 1) for value in best]))


def _rounded(constants: Constants) -> Constants:
    """`constants` to as many digits as they are worth, so that no solver's last digits matter."""
    return replace(
        constants,
        launch_us={each: float(round(us)) for each, us in constants.launch_us.items()},
        idle=round(constants.idle, 1),
    )


@cache
def without_source(source: str) -> Constants:
    """The constants of all other sources."""
    return fit(lambda point: point.source == source)


@cache
def without_generation(generation: Generation) -> Constants:
    """The constants of all other generations."""
    return fit(lambda point: point.group.generation == generation)


def time_us(point: NodePoint, constants: Constants) -> float:
    """Microseconds of a point's collective by NCCL's mechanisms."""
    group = point.group
    known = [each for each in algorithms(point.op, group) if group.algorithm in (None, each)]
    return min(
        durations.by(each, point.op, point.nbytes, group, constants).total for each in known
    )


def _kind(point: NodePoint) -> tuple[str, Generation, str, str]:
    return point.source, point.group.generation, point.op, size_of(point.nbytes)


def _constants(factors: Sequence[float]) -> Constants:
    values = {
        (each.name, each.generation): each.before * factor
        for each, factor in zip(PARAMETERS, factors, strict=True)
    }
    common = values["launch_us", None]
    return replace(
        CONSTANTS, idle=values["idle", None],
        launch_us={each: common * values["launch_us", each] for each in GENERATIONS},
    )


if __name__ == "__main__":
    sys.stdout.write(f"{fit()}\n")
