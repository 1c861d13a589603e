"""Predicted against measured: statistics by hand, pairs, bands, the command and its picture."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree
from errno import EACCES
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zsim.calibration.tables.test_measurements import (
    FOUNDRY,
    MEGATRON,
    NANOTRON,
    TITAN,
    table,
)
from zsim.calibration import accuracy, tables
from zsim.calibration.accuracy import Predicted, groups, pairs, percentile, spearman
from zsim.cli import accuracy as accuracy_commands
from zsim.cli import main


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
    assert found["batch"].median_error_of_ratio == pytest.approx(
        (1 - 0.75 / 0.8 + 1 - 0.9 / 1.2) / 2
    )


def test_a_change_that_is_predicted_to_change_nothing_has_no_right_sign() -> None:
    (found,) = pairs([row(1.0, 1.0, batch="1"), row(1.0, 1.2, batch="2")])
    assert found.sign_right == 0.0


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
    assert main.main(["accuracy", str(tmp_path), "--json", "--plot", str(tmp_path / "p.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["source"], one["line"]) for one in found["rows"]] == [
        ("a.csv", 2), ("a.csv", 3), ("b.csv", 2)
    ]
    assert [(one["source"], one["line"]) for one in found["skipped"]] == [
        ("a.csv", 4), ("b.csv", 3), ("c.csv", 1)
    ]
    assert {
        "source", "gpu", "nodes", "n", "median", "mean", "p95", "max", "spearman", "bias"
    } <= set(found["groups"][0])
    assert {"source", "line", "predicted", "measured", "error", "band", "assumed"} <= set(
        found["rows"][0]
    )
    for one in found["rows"]:
        assert one["error"] == pytest.approx(one["predicted"] / one["measured"] - 1)
        assert one["band"][0] < one["predicted"] < one["band"][1]
    assert abs(found["rows"][0]["error"]) < 0.05  # MPT-1B at 2,048 tokens on A100: a published row
    picture = xml.etree.ElementTree.fromstring((tmp_path / "p.svg").read_text())
    assert len([node for node in picture.iter() if node.tag.endswith("title")]) == 3


def test_a_row_is_explained_as_its_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", FOUNDRY, FOUNDRY | {"gpu": "x"})
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    said = capsys.readouterr().out
    assert "# assumed: Triton attention, causal" in said
    assert 'cluster = { preset = "dgx-a100-40", nodes = 1, ranks = 8 }' in said
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:3"]) == 0
    assert capsys.readouterr().out.startswith("# skipped: gpu: expected an A100 SXM")
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:9"]) == 2
    assert "found no such row" in capsys.readouterr().err


def test_a_plot_needs_a_name_that_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", FOUNDRY)
    assert main.main(["accuracy", str(tmp_path), "--plot", str(tmp_path / "p.png")]) == 2
    said = capsys.readouterr().err
    assert (
        "expected a file that ends in .svg, found .png; pictures are drawn as SVG alone: --plot "
        "p.svg"
        in said
    )


def test_progress_is_told_every_twenty_rows(tmp_path: Path) -> None:
    told: list[str] = []
    table(tmp_path / "a.csv", *([FOUNDRY | {"gpu": "x"}] * 41))
    accuracy.accuracy(tmp_path, say=told.append)
    assert told == ["a.csv: 20 of 41 rows", "a.csv: 40 of 41 rows"]


SWEEP = {
    "collective": "all_gather",
    "gpu": "H100-80GB",
    "n_ranks": "8",
    "n_nodes": "1",
    "size_bytes": "1048576",
    "time_us": "24.6",
}
PRODUCT = {
    "kind": "max achievable matmul",
    "gpu": "NVIDIA A100 SXM",
    "dtype": "bf16",
    "tflops": "271.2",
    "shape_mxnxk": "1024x10240x5120",
}


def test_collectives_are_predicted_in_seconds_by_collective_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = SWEEP | {"size_bytes": "268435456", "time_us": "729"}
    table(tmp_path / "n.csv", SWEEP, large, SWEEP | {"gpu": "MI300X"}, SWEEP | {"time_us": ""})
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = ["collective all_gather middle", "collective all_gather large"]
    assert [(one["kind"], one["n"]) for one in found["groups"]] == [(kind, 1) for kind in kinds]
    assert set(found["groups"][0]) == set(accuracy_commands.GROUP)
    assert [one["measured"] for one in found["rows"]] == [
        pytest.approx(24.6e-6), pytest.approx(729e-6)
    ]
    assert all(
        abs(one["error"]) < 0.1 and one["band"][0] < one["measured"] < one["band"][1]
        for one in found["rows"]
    )
    assert [(one["line"], one["reason"]) for one in found["skipped"]] == [
        (4, "no NCCL model of the GPU 'MI300X'"),
        (5, "time_us missing or no number"),
    ]
    assert found["pairs"] == []


def test_a_collective_is_explained_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    between = SWEEP | {
        "n_ranks": "16", "n_nodes": "2", "size_bytes": "268435456", "inter_node": "unknown",
        "time_us": "1000",
    }
    table(tmp_path / "n.csv", SWEEP | {"inter_node": ""}, between)
    assert main.main(["accuracy", str(tmp_path), "--explain", "n.csv:3"]) == 0
    assert capsys.readouterr().out == """\
# n.csv line 3, measured 0.001 s
# assumed: 400 GB/s of network per node
collective: all_gather of 268,435,456 B over 16 ranks on 2 nodes
machine: hopper, nvlink, network unknown
algorithm: ring
protocol: Simple
channels: 8
links: 360 GB/s, what a ring has at its narrowest place
bus bandwidth: 324.3 GB/s reached, as nccl-tests counts: 0.9375 of the message in the predicted time
provenance: assumed
predicted: 775.975 us
band: 310.390 us to 1.630 ms
"""


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_a_collectives_bus_bandwidth_is_that_of_nccl_tests_in_the_predicted_time(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight ranks nccl-tests counts 7/8 of the message, 14/8 of an all-reduce's, and a
    broadcast's as it is."""
    table(
        tmp_path / "n.csv",
        SWEEP | {"collective": op, "inter_node": "", "size_bytes": "268435456", "time_us": "1500"},
    )
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["rows"]
    assert main.main(["accuracy", str(tmp_path), "--explain", "n.csv:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["taken_for"]
    assert found["collective"] == f"{op} of 268,435,456 B over 8 ranks on 1 node"
    factor = {"all_reduce": 14 / 8, "broadcast": 1}.get(op, 7 / 8)
    assert float(found["bus bandwidth"].partition(" GB/s reached")[0]) == pytest.approx(
        factor * 0.268435456 / one["predicted"], rel=1e-3
    )
    assert found["links"].endswith("GB/s, what a ring has at its narrowest place")


@pytest.mark.parametrize(
    "others",
    [
        NANOTRON | {"n_gpus": "64", "dp": "64", "nodes": "8"},
        MEGATRON | {"n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": "200"},
    ],
    ids=["shared", "narrow"],
)
def test_a_slower_networks_scenario_says_so_once_and_runs_to_the_nanosecond_as_predicted(
    others: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", others)
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["rows"]
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    said = capsys.readouterr().out
    (cluster,) = (line for line in said.splitlines() if line.startswith("cluster = "))
    assert "slow_links" not in said
    assert cluster.count("nic_bandwidth = ") == 1
    (tmp_path / "asked.toml").write_text(said, encoding="utf-8")
    assert main.main(["run", str(tmp_path / "asked.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_ns"] == round(one["predicted"] * 1e9)


def test_products_are_predicted_and_accelerators_without_a_preset_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = (
        {"gpu": "NVIDIA A100 PCIe"}, {"gpu": "NVIDIA GH200 SXM"}, {"shape_mxnxk": ""},
        {"dtype": "int4"}, {"shape_mxnxk": "0x1x1"},
    )
    table(tmp_path / "g.csv", PRODUCT, *(PRODUCT | other for other in others))
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["rows"]
    assert one["kind"] == "product"
    assert [group["nodes"] for group in found["groups"]] == [1] * len(found["groups"])
    assert one["measured"] == pytest.approx(2 * 1024 * 10240 * 5120 / 271.2e12)
    assert one["band"][0] < one["measured"] < one["band"][1]
    assert [skipped["reason"].partition(":")[0] for skipped in found["skipped"]] == [
        "gpu", "gpu", "shape_mxnxk", "dtype", "shape_mxnxk"
    ]
    assert main.main(["accuracy", str(tmp_path), "--explain", "g.csv:2"]) == 0
    assert "device: preset a100-80" in capsys.readouterr().out


@pytest.mark.parametrize("row", [SWEEP, PRODUCT], ids=["collective", "product"])
def test_what_a_row_was_taken_for_has_the_band_that_its_prediction_has(
    row: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", row)
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["rows"]
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("band: "))
    low, high = (
        float(end.removesuffix(" us")) / 1e6 for end in line.removeprefix("band: ").split(" to ")
    )
    assert (low, high) == (
        pytest.approx(one["band"][0], rel=1e-3), pytest.approx(one["band"][1], rel=1e-3),
    )
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["taken_for"]["band"] == line.removeprefix("band: ")


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops", "shape", "within"),
    [
        ("NVIDIA A100 SXM", "bf16", 271.2, "1024x10240x5120", 0.05),
        ("NVIDIA H100 SXM", "bf16", 794.5, "2048x2048x13312", 0.05),
        ("NVIDIA B200 SXM", "bf16", 1745.0, "1792x16128x3072", 0.05),
        ("NVIDIA B200 SXM", "fp8_e4m3", 3432.5, "15360x4096x3072", 0.2),
        ("NVIDIA H100 SXM", "fp8_e4m3", 1402.6, "1024x9216x14336", 0.2),
    ],
)
def test_the_best_products_alone_are_faster_than_in_training(
    gpu: str, dtype: str, tflops: float, shape: str, within: float, tmp_path: Path
) -> None:
    """Published best products (stas00/ml-engineering). In 8 bits training's rate is assumed and
    tiles are those of 16 bits: 16 %."""
    table(
        tmp_path / "g.csv",
        PRODUCT | {"gpu": gpu, "dtype": dtype, "tflops": str(tflops), "shape_mxnxk": shape},
    )
    (one,) = accuracy.accuracy(tmp_path).rows
    assert abs(one.error) < within
    assert one.band[0] < one.measured / one.predicted < one.band[1]


def test_an_nccl_log_that_was_cut_is_skipped_with_its_count(tmp_path: Path) -> None:
    log = tmp_path / "run.txt"
    log.write_text("# nThread 1\n  1024  256  float  sum  -1  30.1  0.03  0.06  0\n  2048  512  "
                   "float  sum  -1  30.2  0.06  0.1  0\n")
    found = accuracy.accuracy(log)
    assert [one.reason for one in found.skipped] == ["log cut: no closing summary (2 rows)"]
    assert not found.rows


def test_a_table_whose_notes_speak_of_nccl_tests_is_still_a_table(tmp_path: Path) -> None:
    table(tmp_path / "g.csv", PRODUCT | {"notes": "as with nccl-tests, # nThread 1"})
    assert [one.kind for one in accuracy.accuracy(tmp_path).rows] == ["product"]


SHORT = FOUNDRY | {
    "model": "", "attn_impl": "triton", "n_layers": "2", "grad_accum": "1",
    "global_batch_seqs": "64",
}
NCCL_LOG = """# nThread 1 nGpus 2
# Using devices
#  Rank  0 Group  0 Pid 1 on node-a device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid 1 on node-a device  1 [0000:0f:00] NVIDIA H100 80GB HBM3
#                                                              out-of-place                       in-place
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1  3000.00  357.91  357.91       0  3000.00  357.91  357.91       0
# Avg bus bandwidth    : 358.2
"""  # noqa: E501


def test_every_file_of_a_folder_is_read_or_skipped_by_name(tmp_path: Path) -> None:
    table(tmp_path / "UPPER.CSV", SWEEP)
    (tmp_path / "sub").mkdir()
    table(tmp_path / "sub" / "a.csv", SWEEP, SWEEP)
    (tmp_path / "sub" / "all_reduce.txt").write_text(NCCL_LOG)
    (tmp_path / "unnamed.log").write_text(NCCL_LOG)
    (tmp_path / "bad.csv").write_text('collectve,b\n1,"2\n3,4\n5,6\n')
    (tmp_path / "wide.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "blank.csv").write_text("\n\n")
    (tmp_path / "other.json").write_text('["no", "run"]')
    (tmp_path / "run.json").write_text('{"schema_version": 1, "scenario": "x"}')
    (tmp_path / "words.md").write_text("# words")
    (tmp_path / ".hidden.csv").write_text("a")
    found = accuracy.accuracy(tmp_path)
    assert {row.source for row in found.rows} == {"UPPER.CSV", "sub/a.csv", "sub/all_reduce.txt"}
    reasons = {one.source: one.reason for one in found.skipped}
    assert set(reasons) == {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("[!.]*") if path.is_file()
    } - {row.source for row in found.rows}
    for name, words in {
        "bad.csv": "expected a CSV table in UTF-8 or UTF-16, found unexpected end of data (3 rows)",
        "wide.csv": "columns of no known source: a, b",
        "binary.csv": "expected a CSV table in UTF-8",
        "empty.csv": "an empty file",
        "blank.csv": "an empty file",
        "other.json": "not a whole run of nccl-tests",
        "run.json": "a saved Run",
        "words.md": "no file of measurements",
        "unnamed.log": "no collective named: `--collective` says it",
    }.items():
        assert reasons[name].startswith(words)
    named = accuracy.accuracy(tmp_path / "unnamed.log", collective="all_reduce")
    assert [row.of for row in named.rows] == ["all_reduce large"]


def test_links_pipes_and_closed_folders_are_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for place in (folder, elsewhere, folder / "closed"):
        place.mkdir()
        table(place / "a.csv", SWEEP)
    (folder / "link.csv").symlink_to(elsewhere / "a.csv")
    (folder / "gone.csv").symlink_to(tmp_path / "nothing.csv")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "zero.csv").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.csv")
    scandir = os.scandir

    def without(path: str) -> Any:
        if str(path).endswith("closed"):  # a user who may do everything is shut out of nothing
            raise PermissionError(EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", without)
    found = tables.files(folder)
    assert [name for _, name in found.files] == ["a.csv", "link.csv"]
    assert {
        one.source: one.reason.partition(",")[0].partition(":")[0] for one in found.skipped
    } == {
        "gone.csv": "a link to a file that is not here", "linked": "a link to a folder",
        "zero.csv": "no plain file", "pipe.csv": "no plain file",
        "closed": "a folder that cannot be listed",
    }


def test_files_beyond_the_most_that_are_read_are_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_FILES", 1)
    for name in ("a.csv", "b.csv"):
        table(tmp_path / name, SWEEP)
    found = accuracy.accuracy(tmp_path)
    assert ([row.source for row in found.rows], [one.source for one in found.skipped]) == (
        ["a.csv"], ["b.csv"],
    )


def test_a_damaged_file_that_is_asked_for_by_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text('a,b\n1,"2\n')
    assert main.main(["accuracy", str(tmp_path / "bad.csv")]) == 2


def test_a_row_in_a_subfolder_is_explained_by_its_place_or_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    table(tmp_path / "sub" / "a.csv", FOUNDRY)
    for name in ("sub/a.csv:2", "sub/a:2", "a.csv:2"):
        assert main.main(["accuracy", str(tmp_path), "--explain", name]) == 0
        assert capsys.readouterr().out.startswith("# sub/a.csv line 2, measured")


def test_the_band_is_wider_by_what_a_row_leaves_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = FOUNDRY | {"attn_impl": "triton"}
    table(tmp_path / "a.csv", whole | {"colour": ""}, whole | {"colour": "blue"})
    plain, open_ = accuracy.accuracy(tmp_path).rows
    assert open_.predicted == plain.predicted
    assert open_.band == (pytest.approx(plain.band[0] / 1.1), pytest.approx(plain.band[1] * 1.1))
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:3"]) == 0
    said = capsys.readouterr().out
    assert "# assumed: colour = 'blue' changes nothing: the column is not known" in said
    assert "# assumed: so the band is 10 % wider on both sides" in said


def test_a_model_that_cannot_fit_is_predicted_with_a_caution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = {
        "model": "mpt-70b", "d_model": "8192", "n_heads": "64", "n_layers": "80",
        "gpu": "h100_80gb",
    }
    large["activation_checkpointing"] = "True"
    rate = {
        "micro_batch": "1", "tokens_per_s": "5000", "tokens_per_s_per_gpu": "",
        "global_batch_seqs": "", "grad_accum": "1",
    }
    table(tmp_path / "a.csv", FOUNDRY | large | rate)
    (one,) = accuracy.accuracy(tmp_path).rows
    assert one.assumed[-1].startswith("as mapped it cannot fit: ")
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    assert "as mapped it cannot fit: " in capsys.readouterr().out


def test_worlds_of_two_sizes_that_both_shard_over_all_ranks_are_a_pair(tmp_path: Path) -> None:
    more = {"n_gpus": "128", "dp_shard": "128", "tokens_per_s_per_gpu": "5000"}
    table(tmp_path / "a.csv", TITAN, TITAN | more, TITAN | more | {"dp_shard": "8"})
    found = {pair.field: pair for pair in accuracy.accuracy(tmp_path).pairs}
    assert found["n_gpus"].n == 1
    assert found["dp_shard"].n == 1
    assert found["n_gpus"].sign_right == 1


def test_a_model_of_other_sizes_is_one_change_whatever_its_name() -> None:
    rows = [row(1.0, 1.0, model="a", **{"model.layers": layers}) for layers in ("1", "2")]
    assert [
        (pair.field, pair.n)
        for pair in pairs([*rows, row(2.0, 2.0, model="b", **{"model.layers": "3"})])
    ] == [("model", 3)]


def test_rows_that_attend_otherwise_are_a_pair_of_that(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", SHORT | {"attn_impl": "triton"}, SHORT | {"attn_impl": "torch"})
    assert [(pair.field, pair.n) for pair in accuracy.accuracy(tmp_path).pairs] == [
        ("attn_impl", 1)
    ]
