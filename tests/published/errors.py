"""The README's table of errors, from the rows beside this file: `python -m tests.published.errors`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import mean, median

from tests.published import steps_left_out
from tests.published.convert import TABLES
from tests.published.nccl_fit import source_of
from tests.published.nccl_left_out import LeftOut, predict_left_out
from zsim.calibration import collectives
from zsim.calibration.accuracy import percentile
from zsim.calibration.collectives import Prediction
from zsim.calibration.data import table
from zsim.calibration.records import Collective
from zsim.calibration.row_predictions import Predicted, Size, predictions, size_of

SLOW = "vtrain_megatron_ds_a100.csv"
STEPS = {
    "mpt_llm_foundry.csv": "llm-foundry: MPT 125M to 7B, FSDP, 8 to 64 A100, 8 H100",
    SLOW: "vTrain: Megatron-DeepSpeed, data parallel, 2 to 8 A100",
    "fms_fsdp.csv": "fms-fsdp: Llama 2 7B, 128 A100",
    "torchtitan.csv": "torchtitan: Llama 3.1 8B, 8 H100 of 500 W",
    "ultrascale_playbook_sweep.csv": "nanotron: Llama 1B, 8 to 256 H100, shared network",
}
SIZES: dict[Size, str] = {"large": "from 64 MiB", "middle": "1 to 64 MiB", "small": "below 1 MiB"}
RECORDED = {"mpt_llm_foundry.csv": "generation"}
"""Part of the record of `steps_left_out` from which the table's entry is."""
LEFT_OUT_BY: tuple[LeftOut, ...] = ("source", "generation")
FITTED_IN_PART = {
    SLOW: "never fitted, but its host seen",
    "fms_fsdp.csv": "never fitted, but its norms seen",
    "torchtitan.csv": "never fitted, but its power seen",
    "ultrascale_playbook_sweep.csv": "its network is fitted, with these in view",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One source: predicted over measured less 1 of each row, the number within their band, and the
    table's entry for rows left out."""

    title: str
    errors: tuple[float, ...]
    inside: int
    left_out: str

    def __str__(self) -> str:
        shares = " | ".join(_percent(value) for value in figures(self.errors))
        return f"| {self.title} | {len(self.errors)} | {shares} | {self.inside} | {self.left_out} |"


def figures(errors: Iterable[float]) -> tuple[float, float, float, float]:
    """Median, mean, 95th percentile and largest of the absolute errors."""
    sizes = [abs(each) for each in errors]
    return median(sizes), mean(sizes), percentile(sizes, 95), max(sizes)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


@cache
def predicted(file: str, every: int = 1) -> tuple[Predicted, ...]:
    """Every row of `file` that can be predicted, or each `every`-th."""
    made = [answer for row in table.read(TABLES / file)[::every] for answer in predictions(row)]
    return tuple(row for row in made if isinstance(row, Predicted))


def in_band(rows: Iterable[Predicted]) -> int:
    """Number of measurements within their band."""
    return sum(row.band[0] <= row.measured / row.predicted <= row.band[1] for row in rows)


def of_steps(file: str) -> Line:
    """The line of a file of training steps."""
    rows = predicted(file)
    errors = tuple(row.error for row in rows)
    if file in RECORDED:
        unseen = figures(row.error for row in steps_left_out.recorded()[RECORDED[file]])
        other = f"{_percent(unseen[0])}, {_percent(unseen[2])}"
    else:
        other = FITTED_IN_PART.get(file, "never fitted")
    return Line(STEPS[file], errors, in_band(rows), other)


def measured_collectives() -> list[Collective]:
    """All published collectives but those whose network others used."""
    rows = [row for path in sorted(TABLES.glob("nccl_*.csv")) for row in table.read(path)]
    return [row for row in rows if isinstance(row, Collective) and not row.group]


def error(row: Collective, prediction: Prediction) -> float:
    """Predicted over measured less 1."""
    return prediction.microseconds / (1e6 * row.seconds) - 1


def of_collectives(size: Size) -> Line:
    """The line of all collectives of one size but those whose network others used."""
    rows = [row for row in measured_collectives() if size_of(row.nbytes) == size]
    fitted = [(row, collectives.predict(row)) for row in rows]
    unseen = figures(error(row, predict_left_out(row)) for row in rows)
    inside = sum(answer.low <= 1e6 * row.seconds <= answer.high for row, answer in fitted)
    return Line(
        f"collectives {SIZES[size]}, 2 to 32 GPUs", tuple(error(*each) for each in fitted), inside,
        f"{_percent(unseen[0])}, {_percent(unseen[2])}",
    )


def by_collective() -> Iterator[str]:
    """The lines of the table by collective and size: median and 95th percentile, fitted, and
    without the row's source or its generation."""
    members: dict[tuple[str, Size], list[Collective]] = {}
    for row in measured_collectives():
        members.setdefault((row.op, size_of(row.nbytes)), []).append(row)
    for (op, size), rows in sorted(members.items()):
        fitted = figures(error(row, collectives.predict(row)) for row in rows)
        unseen = [
            figures(error(row, predict_left_out(row, what)) for row in rows) for what in LEFT_OUT_BY
        ]
        shares = (f"{_percent(each[0])}, {_percent(each[2])}" for each in (fitted, *unseen))
        yield f"| {op} | {size} | {len(rows)} | {' | '.join(shares)} |"


def _distance(measured: float, predicted: float, low: float, high: float) -> float:
    """Distance of a measurement to its prediction, over that to the end of the band."""
    return (measured - predicted) / ((high if measured > predicted else low) - predicted)


def distances(file: str) -> float:
    """The 90th percentile of the distances of a file's steps."""
    rows = predicted(file)
    return percentile(
        [_distance(row.measured / row.predicted, 1.0, *row.band) for row in rows], 90
    )


def widths() -> Iterator[str]:
    """The lines of the table of bands by source, fitted and with the source or the generation left
    out.

    Each has the 90th percentile of the distances to predictions, in units of that to the end of the
    band.
    """
    shares: dict[str, list[list[float]]] = {}
    for row in measured_collectives():
        answers = (collectives.predict(row), *(predict_left_out(row, what) for what in LEFT_OUT_BY))
        shares.setdefault(source_of(row), []).append([_of_band(row, each) for each in answers])
    for source, members in sorted(shares.items()):
        told = " | ".join(f"{percentile(each, 90):.2f}" for each in zip(*members, strict=True))
        yield f"| {source} | {len(members)} | {told} |"


def _of_band(row: Collective, answer: Prediction) -> float:
    return _distance(1e6 * row.seconds, answer.microseconds, answer.low, answer.high)


def left_out() -> Iterator[str]:
    """The lines of the table of steps left out, from the record."""
    for what, rows in steps_left_out.recorded().items():
        shares = " | ".join(_percent(value) for value in figures(row.error for row in rows))
        inside = sum(row.distance <= 1 for row in rows)
        distance = percentile([row.distance for row in rows], 90)
        yield f"| {what} | {len(rows)} | {shares} | {inside} | {distance:.2f} |"


def lines(*, slow: bool) -> list[str]:
    """The table's lines; without the slow source where asked."""
    return [
        *(str(of_steps(file)) for file in STEPS if slow or file != SLOW),
        *(str(of_collectives(size)) for size in SIZES),
    ]


if __name__ == "__main__":
    tables = {"by-collective": by_collective, "widths": widths, "left-out": left_out}
    asked = next((tables[name] for name in sys.argv[1:] if name in tables), None)
    printed = [*asked()] if asked else lines(slow=True)
    sys.stdout.write("\n".join(printed) + "\n")
