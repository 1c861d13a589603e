"""Pairs of measured steps that differ in one field: none is missed where rows are many."""

from __future__ import annotations

from zsim.calibration import accuracy
from zsim.calibration.accuracy import pairs
from zsim.calibration.row_predictions import Predicted


def row(measured: float, **fields: str) -> Predicted:
    return Predicted(
        source="s.csv", line=2, kind="step", gpu="A100", nodes=1,
        predicted=1.0 if fields["compile"] == "no" else 0.5, measured=measured, band=(0.9, 1.1),
        assumed=(), fields=fields,
    )


def test_every_row_of_a_long_table_counts() -> None:
    many = [row(1.0, compile="no", batch="1") for _ in range(2100)]
    (only,) = pairs([*many, row(0.5, compile="yes", batch="1")])
    assert (only.field, only.n, only.sign_right, only.median_error_of_ratio) == (
        "compile", 2100, 1.0, 0.0,
    )


def test_where_pairs_would_be_millions_each_row_is_held_against_the_next_ones() -> None:
    (only,) = pairs(
        [row(1.0, compile=("no", "yes")[index % 2], batch="1") for index in range(3000)]
    )
    each = accuracy.MAX_PAIRS // 3000
    assert only.n == sum(-(-min(each, 2999 - index) // 2) for index in range(3000))
