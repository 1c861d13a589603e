"""Predicted against measured: statistics by hand, pairs, bands, the command and its picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zsim.test_measurements import FOUNDRY, MEGATRON, table
from zsim import accuracy, cli
from zsim.accuracy import Predicted, groups, pairs, percentile, spearman


def row(predicted: float, measured: float, *, per: float = 1.0, **fields: str) -> Predicted:
    return Predicted(
        source="t.csv",
        line=2,
        kind="step",
        gpu="g",
        nodes=1,
        predicted=predicted,
        measured=measured,
        band=(0.9, 1.1),
        assumed=(),
        fields=fields,
        per=per,
    )


def test_a_group_says_median_mean_percentile_largest_order_and_bias() -> None:
    (group,) = groups([row(1.1, 1.0), row(1.9, 2.0), row(3.0, 3.0), row(5.0, 4.0)])
    assert group.n == 4
    assert group.median == pytest.approx(0.075)
    assert group.mean == pytest.approx(0.1)
    assert group.max == pytest.approx(0.25)
    assert group.p95 == pytest.approx(0.1 + 0.85 * 0.15)
    assert group.spearman == 1.0
    assert group.bias == pytest.approx(0.05)


def test_spearman_knows_ties_reversal_and_too_few() -> None:
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_a_percentile_lies_among_the_values(values: list[float]) -> None:
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, 0.95) <= ordered[-1]
    assert percentile(ordered, 1.0) == ordered[-1]


def test_pairs_are_rows_that_differ_in_one_field_and_their_times_are_for_each_token() -> None:
    rows = [
        row(1.0, 1.0, model="a", batch="1"),
        row(1.5, 1.6, per=2.0, model="a", batch="2"),
        row(2.0, 2.0, model="b", batch="2"),
        row(0.9, 1.2, model="b", batch="1"),
    ]
    found = {pair.field: pair for pair in pairs(rows)}
    assert (found["batch"].n, found["model"].n) == (2, 2)
    assert found["batch"].sign_right == 1.0
    assert found["model"].sign_right == 0.5
    assert found["batch"].median_error_of_ratio == pytest.approx((1 - 0.75 / 0.8 + 1 - 0.9 / 1.2) / 2)


def test_a_folder_is_predicted_row_by_row_and_what_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(
        tmp_path / "a.csv",
        FOUNDRY,
        FOUNDRY | {"seq_len": "1024", "micro_batch": "16", "global_batch_seqs": "1024"},
        FOUNDRY | {"gpu": "x"},
    )
    table(tmp_path / "b.csv", MEGATRON, MEGATRON | {"tp": "2"})
    table(tmp_path / "c.csv", {"unknown": "1"})
    assert cli.main(["accuracy", str(tmp_path), "--json", "--plot", str(tmp_path / "p.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["source"], one["line"]) for one in found["rows"]] == [("a.csv", 2), ("a.csv", 3), ("b.csv", 2)]
    assert [(one["source"], one["line"]) for one in found["skipped"]] == [("a.csv", 4), ("b.csv", 3), ("c.csv", 1)]
    assert {"source", "gpu", "nodes", "n", "median", "mean", "p95", "max", "spearman", "bias"} <= set(
        found["groups"][0]
    )
    assert {"source", "line", "predicted", "measured", "error", "band", "assumed"} <= set(found["rows"][0])
    for one in found["rows"]:
        assert one["error"] == pytest.approx(one["predicted"] / one["measured"] - 1)
        assert one["band"][0] < one["predicted"] < one["band"][1]
    assert abs(found["rows"][0]["error"]) < 0.05  # MPT-1B at 2,048 tokens on A100: a published row
    picture = xml.etree.ElementTree.fromstring((tmp_path / "p.svg").read_text())
    assert len([node for node in picture.iter() if node.tag.endswith("title")]) == 3


def test_a_row_is_explained_as_its_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(tmp_path / "a.csv", FOUNDRY, FOUNDRY | {"gpu": "x"})
    assert cli.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    said = capsys.readouterr().out
    assert "# assumed: Triton attention, causal" in said
    assert 'cluster = { preset = "dgx-a100-40", nodes = 1, ranks = 8 }' in said
    assert cli.main(["accuracy", str(tmp_path), "--explain", "a.csv:3"]) == 0
    assert capsys.readouterr().out.startswith("# skipped: gpu: expected an A100")
    assert cli.main(["accuracy", str(tmp_path), "--explain", "a.csv:9"]) == 2
    assert "found no such row" in capsys.readouterr().err


def test_a_plot_needs_a_name_that_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table(tmp_path / "a.csv", FOUNDRY)
    assert cli.main(["accuracy", str(tmp_path), "--plot", str(tmp_path / "p.png")]) == 2
    assert "expected a file that ends in .svg" in capsys.readouterr().err


def test_progress_is_told_every_twenty_rows(tmp_path: Path) -> None:
    told: list[str] = []
    table(tmp_path / "a.csv", *([FOUNDRY | {"gpu": "x"}] * 41))
    accuracy.accuracy(tmp_path, say=told.append)
    assert told == ["a.csv: 20 of 41 rows", "a.csv: 40 of 41 rows"]
