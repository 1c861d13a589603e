"""Cells that no measurement has: whatever one row says, it is predicted or skipped by name, and the
rows beside it are predicted."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from time import perf_counter

import pytest

from tests.zsim.calibration.tables.test_measurements import FOUNDRY, ROWS, found, reason, table
from zsim.calibration import accuracy, tables
from zsim.calibration.accuracy import Predicted, predict_row
from zsim.calibration.nccl_tests.checks import collect
from zsim.calibration.nccl_tests.rows import NcclRow
from zsim.calibration.rows.checks import Assumed
from zsim.calibration.rows.records import RowError
from zsim.calibration.tables import Product, Record, Skipped, Step
from zsim.calibration.tables.scenario_text import checkpointing

HOSTILE = (
    *(
        "1e300", "1e308", "-1", "0", "nan", "inf", "-inf", "1e-300", "1e-14", "1e15", "1e16",
        "9" * 15, "1" + "0" * 400, "9" * 5000,
    ),
    *("0." + "0" * 400 + "1", "text", "", "1/0", "1_0", "\u0663", "0x10", "%s", "\U0001f600"),
)
NCCL = {
    "collective": "all_reduce",
    "gpu": "A100",
    "n_ranks": "16",
    "n_ranks_inferred": "16",
    "n_nodes": "2",
    "size_bytes": "1073741824",
    "inter_node": "8x200G HDR",
    "intra_node": "NVLink",
    "nccl_version": "2.27.7",
    "tool": "nccl-tests",
    "notes": "",
    "algo": "",
    "proto": "",
    "time_us_oop": "11000",
    "busbw_gb_s_oop": "",
}
PRODUCT = {
    "gpu": "A100",
    "dtype": "bf16",
    "tflops": "271.2",
    "theory_tflops": "312",
    "efficiency_pct": "86.9",
    "shape_mxnxk": "1024x1024x512",
}
FIGURES = (
    "n_params", "expansion_ratio", "peak_tflops_used", "mfu_pct", "seqs_per_s", "gpus_per_node",
    "nodes", "inter_node_gbps_per_node",
)
ALL = {
    name: row | {figure: row.get(figure, "") for figure in FIGURES} for name, row in ROWS.items()
} | {"nccl": NCCL, "products": PRODUCT}


@pytest.mark.parametrize("name", ALL)
def test_no_cell_leads_to_arithmetic_that_fails(tmp_path: Path, name: str) -> None:
    """Every column with every hostile value: what is no figure of a measurement is refused by name,
    before anything is computed of it.

    Among so many good rows that those of collectives are not doubted for the others of their
    series.
    """
    row, good = ALL[name], 5 * len(HOSTILE)
    for column in row:
        read = tables.rows(
            table(tmp_path / "t.csv", *[row] * good, *(row | {column: value} for value in HOSTILE))
        )
        assert len(read) == good + len(HOSTILE)
        failed = [one for one in read if isinstance(one, Skipped) and "no arithmetic" in one.reason]
        assert not failed, column
        first = next(one for one in read if one.line == 2)
        assert not isinstance(first, Skipped), first
        if isinstance(first, NcclRow | Product):
            for one in (first, *(one for one in read if one.line > 1 + good)):
                made = one if isinstance(one, Skipped) else predict_row(one)
                assert isinstance(made, Skipped) or (
                    isfinite(made.predicted) and made.predicted > 0
                )


@pytest.mark.parametrize("value", ["1e300", "1e308", "1e-300"])
def test_a_strange_cell_does_not_end_a_folder(tmp_path: Path, value: str) -> None:
    one = FOUNDRY | {
        "model": "", "n_layers": "2", "tokens_per_s_per_gpu": "", "global_batch_seqs": "",
        "grad_accum": "1",
    }
    one["tokens_per_s"] = "800000"
    table(
        tmp_path / "mpt.csv", one | {"expansion_ratio": "4"}, one | {"expansion_ratio": value},
        one | {"expansion_ratio": "4"},
    )
    made = accuracy.accuracy(tmp_path)
    assert [row.line for row in made.rows] == [2, 4]
    words = f"expansion_ratio: expected a number of 1e-15 to 1e+15, found '{value}'"
    assert made.skipped == (Skipped(source="mpt.csv", line=3, reason=words),)


@pytest.mark.parametrize("value", ["1_0", "\u0661\u0660"])
def test_what_only_python_calls_a_number_is_none(tmp_path: Path, value: str) -> None:
    assert reason(tmp_path, FOUNDRY | {"n_layers": value}) == (
        f"n_layers: expected a whole number, found '{value}'"
    )


@pytest.mark.parametrize("column", ["notes", "inter_node", "intra_node", "gpu", "tool"])
@pytest.mark.parametrize("sign", ["9", "a", " ", "=", "x ", "8x"])
def test_long_words_are_read_in_a_moment(tmp_path: Path, column: str, sign: str) -> None:
    """A cell of 60,000 signs, on which some patterns would take time in proportion to its square:
    minutes."""
    begin = perf_counter()
    tables.rows(table(tmp_path / "t.csv", NCCL | {column: 60_000 // len(sign) * sign}))
    assert perf_counter() - begin < 5


def test_a_row_whose_figures_still_lead_to_none_is_skipped_by_name() -> None:
    """What the bounds do not keep out must not end a folder either."""

    def divided(record: Record, *, source: str) -> Step:
        raise ZeroDivisionError(f"{source} {record.line}")

    words = "no arithmetic can be done with its figures: "
    assert list(tables.each([Record(2, {"a": "1"})], "t.csv", divided)) == [
        Skipped(source="t.csv", line=2, reason=f"{words}t.csv 2")
    ]

    def counted() -> NcclRow:
        raise OverflowError("too large")

    (skipped,) = collect([(7, counted)], "log").skipped
    assert (skipped.line, skipped.reason) == (7, f"{words}too large")
    large = Product(
        source="p.csv", line=2, gpu="A100", dtype="bfloat16", shape=(10**400, 1, 1),
        device="a100-80", seconds=1.0, fields={}, assumed=(),
    )
    beyond = predict_row(large)
    assert isinstance(beyond, Skipped)
    assert beyond.reason.startswith(words)


def test_a_hostile_step_that_is_mapped_is_predicted(tmp_path: Path) -> None:
    """Sizes that make a model still, as one of a single head or layer."""
    small = FOUNDRY | {
        "model": "", "tokens_per_s_per_gpu": "", "global_batch_seqs": "", "grad_accum": "1",
        "n_layers": "1",
    }
    small["tokens_per_s"] = "1300000"
    for change in ({}, {"n_heads": "1", "attn_impl": "torch"}, {"vocab_size": "1000"}):
        (made,) = found(table(tmp_path / "t.csv", small | change))
        assert isinstance(made, Step), made
        assert isinstance(predict_row(made), Predicted)


@pytest.mark.parametrize(
    ("words", "table"),
    [
        ("full (use_checkpoint=true in the configuration)", {"mode": "full"}),
        ("Full activation checkpointing of every layer", {"mode": "full"}),
        ("none (assumed; a benchmark)", {}), ("False", {}), ("0", {}),
        ("full (use_checkpoint=false)", None), ("full, but off for the last 4 blocks", None),
        ("full except attention", None), ("full (partly)", None), ("none or full", None),
        ("none (selective in the other runs)", None), ("true 0.5", None),
        ("0 of 32 blocks, later 4", None),
    ],
)
def test_words_for_checkpointing_give_one_answer_or_none(
    words: str, table: dict[str, str] | None
) -> None:
    if table is None:
        with pytest.raises(RowError, match="activation_checkpointing"):
            checkpointing(words, Assumed([]))
    else:
        assert checkpointing(words, Assumed([])) == table
