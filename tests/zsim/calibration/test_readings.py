"""A row that leaves a key open is every scenario it may have been: predicted by their middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zsim.calibration.tables import STEP, table
from zsim.calibration import explain_row
from zsim.calibration.data.table import read
from zsim.calibration.fitting import planned_steps
from zsim.calibration.records import Step, TableError
from zsim.calibration.row_predictions import Predicted, predictions

KERNELS = "execution.attention_kernels"
WHY = {"assumed": "the row names no version of flash attention"}


def step(path: Path, **cells: str) -> Step:
    (row,) = read(table(path / "row.csv", {**STEP, **cells}))
    assert isinstance(row, Step)
    return row


def predicted(row: Step) -> Predicted:
    (answer,) = predictions(row)
    assert isinstance(answer, Predicted)
    return answer


def test_the_middle_is_the_prediction_and_the_band_holds_both_bands(tmp_path: Path) -> None:
    slow, fast = (
        predicted(step(tmp_path, **{KERNELS: kernels})) for kernels in ("triton", "flash2")
    )
    both = predicted(step(tmp_path, **{KERNELS: "triton | flash2"}, **WHY))
    assert fast.predicted < slow.predicted
    assert both.predicted == pytest.approx((slow.predicted + fast.predicted) / 2)
    low, high = (end * both.predicted for end in both.band)
    assert low == pytest.approx(fast.band[0] * fast.predicted)
    assert high == pytest.approx(slow.band[1] * slow.predicted)


def test_open_keys_multiply_and_their_order_does_not_matter(tmp_path: Path) -> None:
    early = "activation_checkpointing.early_stop"
    cells = {"activation_checkpointing.mode": "full", early: "false | true", **WHY}
    one_way = step(tmp_path, **{**cells, KERNELS: "triton | flash2"})
    other = step(tmp_path, **{**cells, early: "true | false", KERNELS: "flash2 | triton"})
    assert len(one_way.readings) == 4
    assert set(one_way.readings) == set(other.readings)
    assert predicted(one_way).predicted == predicted(other).predicted


def test_a_peak_is_the_middle_of_both_peaks(tmp_path: Path) -> None:
    peak = {"measured.step_time": "", "measured.peak_allocated": "10 GiB"}
    micro = "batch.micro_batch"
    small, large = (predicted(step(tmp_path, **{**peak, micro: size})) for size in ("4", "8"))
    both = predicted(step(tmp_path, **{**peak, micro: "4 | 8"}, **WHY))
    assert both.predicted == round((small.predicted + large.predicted) / 2)
    assert both.band[1] * both.predicted == pytest.approx(large.predicted)


def test_a_fit_sees_the_middle_too(tmp_path: Path) -> None:
    row = step(tmp_path, **{KERNELS: "triton | flash2"}, **WHY)
    (case,), skipped = planned_steps.prepared([row])
    assert skipped == []
    assert planned_steps.predicted(case, {}) == predicted(row).predicted


def test_the_explained_row_names_what_is_open(tmp_path: Path) -> None:
    row = step(tmp_path, **{KERNELS: "triton | flash2"}, **WHY)
    text = explain_row.text(row, as_json=False)
    assert f"# assumed: {WHY['assumed']}" in text
    assert f"# assumed: {KERNELS}: triton | flash2; all are predicted" in text


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({KERNELS: "triton | flash2"}, "assumed: expected why execution.attention_kernels is left"),
        ({"batch.micro_batch": " | ".join("123456789"), **WHY}, "expected at most 8 scenarios"),
        ({KERNELS: "triton | flash9", **WHY}, "flash9"),
    ],
)
def test_bad_readings_are_refused(tmp_path: Path, cells: dict[str, str], expected: str) -> None:
    with pytest.raises(TableError, match=expected):
        step(tmp_path, **cells)
