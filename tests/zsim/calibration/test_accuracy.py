"""Predicted against measured: statistics by hand, pairs, bands, the command and its picture."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from errno import EACCES
from math import hypot, log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.folders import SCENARIOS
from tests.zsim.calibration.tables import GATHER, STEP, table
from zsim.calibration import accuracy
from zsim.calibration.accuracy import groups, pairs, percentile, spearman
from zsim.calibration.data import measurements
from zsim.calibration.row_predictions import Predicted
from zsim.cli import main
from zsim.cli.commands.calibration import accuracy as accuracy_commands
from zsim.io.system import parallel
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.runs.registry import SimBackend
from zsim.scenario.scenario import load


def row(predicted: float, measured: float, *, per: float = 1.0, **fields: str) -> Predicted:
    return Predicted(
        source="t.csv", line=2, kind="step", gpu="g", nodes=1, predicted=predicted,
        measured=measured, band=(0.9, 1.1), assumed=(), fields=fields, per=per,
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
    high = percentile(values, 95)
    assert min(values) <= high or high == pytest.approx(min(values))
    assert high <= max(values) or high == pytest.approx(max(values))


def test_pairs_are_rows_that_differ_in_one_field_and_their_times_are_for_each_token() -> None:
    rows = [
        row(1.0, 1.0, model="a", batch="1"), row(1.5, 1.6, per=2.0, model="a", batch="2"),
        row(2.0, 2.0, model="b", batch="2"), row(0.9, 1.2, model="b", batch="1"),
    ]
    by_field = {pair.field: pair for pair in pairs(rows)}
    assert (by_field["batch"].n, by_field["model"].n) == (2, 2)
    assert by_field["batch"].sign_right == 1.0
    assert by_field["model"].sign_right == 0.5
    sizes = [log(0.75) / log(0.8), log(0.45) / log(0.6)]  # 1.29, 1.56
    assert by_field["batch"].size == pytest.approx(sum(sizes) / 2)
    assert by_field["batch"].size_right == 0.5
    assert by_field["batch"].median_error_of_ratio == pytest.approx(
        (1 - 0.75 / 0.8 + 1 - 0.9 / 1.2) / 2
    )


def test_a_change_that_is_predicted_to_change_nothing_has_no_right_sign() -> None:
    (pair,) = pairs([row(1.0, 1.0, batch="1"), row(1.0, 1.2, batch="2")])
    assert (pair.sign_right, pair.size, pair.size_right) == (0.0, 0.0, 0.0)


def test_changes_of_next_to_nothing_have_neither_sign_nor_size() -> None:
    (pair,) = pairs([row(1.0, 1.0, batch="1"), row(1.3, 1.02, batch="2")])
    assert (pair.sign_right, pair.size, pair.size_right) == (None, None, None)


def test_the_size_of_a_change_by_ranks_is_its_slope_over_the_measured_one() -> None:
    """Predicted 2 % a doubling, measured 4 %."""
    rows = [
        row(1.02**n, 1.04**n, **{"cluster.nodes": str(2**n), "strategy.dp_shard": str(8 * 2**n)})
        for n in range(3)
    ]
    (pair,) = pairs(rows)
    assert (pair.field, pair.n) == ("ranks", 3)
    assert pair.size == pytest.approx(log(1.02) / log(1.04))


def test_a_folder_is_predicted_row_by_row_and_what_is_no_measurement_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"batch.micro_batch": "4", "measured.step_time": "3.5 s"}
    table(tmp_path / "a.csv", STEP, STEP | short)
    table(tmp_path / "b.csv", GATHER)
    table(tmp_path / "c.csv", {"unknown": "1"})
    assert main.main(["accuracy", str(tmp_path), "--json", "--plot", str(tmp_path / "p.svg")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(each["source"], each["line"]) for each in printed["rows"]] == [
        ("a.csv", 2), ("a.csv", 3), ("b.csv", 2)
    ]
    assert [(each["source"], each["line"]) for each in printed["skipped"]] == [("c.csv", 1)]
    assert {
        "source", "gpu", "nodes", "n", "median", "mean", "p95", "max", "spearman", "bias"
    } <= set(printed["groups"][0])
    for each in printed["rows"]:
        assert each["error"] == pytest.approx(each["predicted"] / each["measured"] - 1)
        assert each["band"][0] < each["predicted"] < each["band"][1]
        assert (each["unit"], each["assumed"]) == ("s", [])
    # MPT-1B at 2,048 tokens on A100: a published row
    assert abs(printed["rows"][0]["error"]) < 0.05


def test_peaks_are_predicted_as_the_memory_report_says(tmp_path: Path) -> None:
    peaks = {"measured.peak_allocated": "30 GiB", "measured.peak_reserved": "33 GiB"}
    table(tmp_path / "a.csv", STEP | peaks)
    step, allocated, reserved = accuracy.accuracy(tmp_path).rows
    assert [(each.kind, each.of, each.unit) for each in (step, allocated, reserved)] == [
        ("step", "", "s"), ("peak", "allocated", "B"), ("peak", "reserved", "B")
    ]
    assert allocated.measured == 30 * 2**30
    assert allocated.predicted < reserved.predicted
    assert reserved.band == (allocated.predicted / reserved.predicted, 1.0)


def test_a_row_is_explained_as_its_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_ = {"assumed": "Triton attention; pauses", "widens": "0.1"}
    table(tmp_path / "a.csv", STEP | open_)
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    printed = capsys.readouterr().out
    assert "# assumed: Triton attention\n# assumed: pauses\n" in printed
    assert "# assumed: so the time may be another 10 % off\n" in printed
    assert 'cluster = { preset = "a100-40-roce", nodes = 1 }\n' in printed
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:9"]) == 2
    assert "found no such row" in capsys.readouterr().err


def test_a_row_that_does_not_fit_is_explained_with_a_warning_and_not_as_an_assumption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", STEP | {"batch.micro_batch": "64"})
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    printed = capsys.readouterr().out
    assert "# warning: the scenario does not fit: " in printed
    assert "# assumed:" not in printed


def test_an_explained_scenario_runs_to_the_nanosecond_as_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others take most of that network."""
    slow = {
        "cluster.nodes": "8", "strategy.dp_shard": "64", "cluster.nic_bandwidth": "5 GB/s",
        "network.least": "0.3", "network.most": "3",
    }
    table(tmp_path / "a.csv", STEP | slow)
    (row,) = accuracy.accuracy(tmp_path).rows
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    printed = capsys.readouterr().out
    assert "# assumed: others used the network: collectives take 0.3 to 3 times as long" in printed
    (tmp_path / "asked.toml").write_text(printed, encoding="utf-8")
    assert main.main(["run", str(tmp_path / "asked.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_ns"] == round(row.predicted * 1e9)


def test_nothing_predicted_is_an_error_with_its_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.csv").write_text("")
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 2
    printed = capsys.readouterr()
    (error,) = json.loads(printed.out)["error"]
    assert error == (
        f"{tmp_path}: expected a measured step, peak or collective that can be predicted, found 1 "
        "× an empty file  (empty.csv line 1)"
    )
    assert error in printed.err


def test_saved_runs_are_predicted_where_their_scenarios_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that took 8 % longer than predicted; and Runs that are no measurement, by name."""
    file = SCENARIOS / "published" / "llama-3-8b-8-h100.toml"
    run = SimBackend().run(load(file), options=RunOptions())
    assert run.step_time_ns
    longer = replace(
        run, backend="nccl", step_time_ns=round(1.08 * run.step_time_ns),
        provenance={**run.provenance, "device": "NVIDIA H100 80GB HBM3"},
    )
    saved.save(longer, tmp_path / "measured.json")
    asked = ["accuracy", str(tmp_path), "--scenarios", str(file.parent), "--json"]
    assert main.main(asked) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["source"], row["line"], row["kind"]) == ("measured.json", 1, "step")
    assert row["error"] == pytest.approx(1 / 1.08 - 1, abs=1e-6)
    assert main.main([*asked[:-1], "--explain", "measured.json:1"]) == 0
    assert 'model = { preset = "llama-3-8b" }' in capsys.readouterr().out
    saved.save(run, tmp_path / "simulated.json")
    (tmp_path / "broken.json").write_text('{"schema_version": 1, "run": 3}')
    assert main.main(asked) == 0
    reasons = {
        each["source"]: each["reason"] for each in json.loads(capsys.readouterr().out)["skipped"]
    }
    assert reasons["simulated.json"] == "simulated, not measured"
    assert reasons["broken.json"].startswith("expected ")
    assert main.main(asked[:2]) == 2
    assert "a saved Run: --scenarios FOLDER is where its scenario is looked for" in (
        capsys.readouterr().err
    )


def test_what_a_terminal_would_obey_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "a\u202eb\u2066c\u200fd\ue000e\x9bf"
    table(tmp_path / "a.csv", STEP | {"assumed": odd, "group": odd, "source": odd})
    for command in ([], ["--explain", "a.csv:2"]):
        assert main.main(["accuracy", str(tmp_path), *command]) == 0
        assert [c for c in capsys.readouterr().out if not (c.isprintable() or c == "\n")] == []


def test_a_plot_needs_a_name_that_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", GATHER)
    assert main.main(["accuracy", str(tmp_path), "--plot", str(tmp_path / "p.png")]) == 2
    streams = capsys.readouterr().err
    assert (
        "expected a file that ends in .svg, found .png; pictures are drawn as SVG alone: --plot "
        "p.svg"
        in streams
    )


def test_progress_is_told_every_hundred_rows(tmp_path: Path) -> None:
    lines: list[str] = []
    table(tmp_path / "a.csv", *([GATHER] * 141))
    accuracy.accuracy(tmp_path, say=lines.append)
    assert lines == ["a.csv: 100 of 141 rows", "a.csv: 141 of 141 rows"]


def test_all_cores_answer_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path / "a.csv", *({**STEP, "batch.micro_batch": str(size)} for size in range(1, 6)))
    monkeypatch.setattr(parallel, "WORTH_S", 0.0)
    monkeypatch.setattr(parallel, "_may_fork", lambda: True)
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    forked = accuracy.accuracy(tmp_path)
    monkeypatch.setattr(parallel, "_may_fork", lambda: False)
    assert accuracy.accuracy(tmp_path) == forked


def test_collectives_are_predicted_in_seconds_by_collective_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = GATHER | {"bytes": "256 MiB", "measured.time": "729 us"}
    table(tmp_path / "n.csv", GATHER, large, large | {"group": "mine"})
    assert main.main(["accuracy", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    kinds = ["all_gather middle", "all_gather large", "all_gather large, mine"]
    assert [(each["kind"], each["n"]) for each in printed["groups"]] == [
        (f"collective {kind}", 1) for kind in kinds
    ]
    assert set(printed["groups"][0]) == set(accuracy_commands.GROUP)
    assert [each["measured"] for each in printed["rows"][:2]] == [
        pytest.approx(24.6e-6), pytest.approx(729e-6)
    ]
    assert all(
        abs(each["error"]) < 0.25 and each["band"][0] < each["measured"] < each["band"][1]
        for each in printed["rows"]
    )
    assert printed["pairs"] == []


BETWEEN = GATHER | {"bytes": "268435456", "cluster.nodes": "2", "measured.time": "1000 us"}


def test_a_collective_is_explained_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "n.csv", GATHER, BETWEEN | {"assumed": "InfiniBand", "widens": "0.5"})
    assert main.main(["accuracy", str(tmp_path), "--explain", "n.csv:3"]) == 0
    assert capsys.readouterr().out == """\
# n.csv line 3, measured 0.001 s
# assumed: InfiniBand
# assumed: so the time may be another 50 % off
collective: all_gather of 268,435,456 B over 16 ranks on 2 nodes
cluster: dgx-h100
machine: hopper, nvlink, network ib
algorithm: ring
protocol: Simple
channels: 16
links: 360 GB/s, what a ring has at its narrowest place
bus bandwidth: 302.1 GB/s reached, as nccl-tests counts: 0.9375 of the message in the predicted time
provenance: assumed
predicted: 832.936 us
band: 416.468 us to 1.562 ms
"""


def test_what_a_row_was_taken_for_has_the_band_that_its_prediction_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", BETWEEN)
    (row,) = accuracy.accuracy(tmp_path).rows
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2", "--json"]) == 0
    low, high = json.loads(capsys.readouterr().out)["taken_for"]["band"].split(" to ")
    units = {"us": 1e-6, "ms": 1e-3}
    ends = [float(end.split()[0]) * units[end.split()[1]] for end in (low, high)]
    assert ends == pytest.approx([row.predicted * factor for factor in row.band], rel=1e-3)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_a_collectives_bus_bandwidth_is_that_of_nccl_tests_in_the_predicted_time(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """nccl-tests counts 7/8 of the message on eight ranks, 14/8 of an all-reduce's, and a
    broadcast's as it is."""
    table(tmp_path / "n.csv", BETWEEN | {"collective": op, "cluster.nodes": "1"})
    (row,) = accuracy.accuracy(tmp_path).rows
    assert main.main(["accuracy", str(tmp_path), "--explain", "n.csv:2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["taken_for"]
    assert printed["collective"] == f"{op} of 268,435,456 B over 8 ranks on 1 node"
    factor = {"all_reduce": 14 / 8, "broadcast": 1}.get(op, 7 / 8)
    assert float(printed["bus bandwidth"].partition(" GB/s reached")[0]) == pytest.approx(
        factor * 0.268435456 / row.predicted, rel=1e-3
    )


def test_an_nccl_log_that_was_cut_is_skipped_with_its_count(tmp_path: Path) -> None:
    log = tmp_path / "run.txt"
    log.write_text("# nThread 1\n  1024  256  float  sum  -1  30.1  0.03  0.06  0\n  2048  512  "
                   "float  sum  -1  30.2  0.06  0.1  0\n")
    report = accuracy.accuracy(log)
    assert [each.reason for each in report.skipped] == ["log cut: no closing summary (2 rows)"]
    assert not report.rows


NCCL_LOG = """# nThread 1 nGpus 2
# Using devices
#  Rank  0 Group  0 Pid 1 on node-a device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid 1 on node-a device  1 [0000:0f:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   \
algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  \
(GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1  3000.00  357.91  357.91       0  3000.00  \
357.91  357.91       0
# Avg bus bandwidth    : 358.2
"""


def test_every_file_of_a_folder_is_read_or_skipped_by_name(tmp_path: Path) -> None:
    table(tmp_path / "UPPER.CSV", GATHER)
    (tmp_path / "sub").mkdir()
    table(tmp_path / "sub" / "a.csv", GATHER, GATHER)
    (tmp_path / "sub" / "all_reduce.txt").write_text(NCCL_LOG)
    (tmp_path / "unnamed.log").write_text(NCCL_LOG)
    (tmp_path / "bad.csv").write_text('measured.step_time,b\n1,"2\n3,4\n5,6\n')
    (tmp_path / "wide.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "blank.csv").write_text("\n\n")
    (tmp_path / "other.json").write_text('["no", "run"]')
    (tmp_path / "run.json").write_text('{"schema_version": 1, "scenario": "x"}')
    (tmp_path / "words.md").write_text("# words")
    (tmp_path / ".hidden.csv").write_text("a")
    report = accuracy.accuracy(tmp_path)
    assert {row.source for row in report.rows} == {"UPPER.CSV", "sub/a.csv", "sub/all_reduce.txt"}
    reasons = {each.source: each.reason for each in report.skipped}
    assert set(reasons) == {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("[!.]*") if path.is_file()
    } - {row.source for row in report.rows}
    for name, reason in {
        "bad.csv": "expected a CSV table in UTF-8, found unexpected end of data",
        "wide.csv": "no measurements: a table has columns that begin with measured.",
        "binary.csv": "no measurements: ", "empty.csv": "an empty file",
        "blank.csv": "an empty file", "other.json": "no measurements: ",
        "run.json": "a saved Run", "words.md": "not a measurement file",
        "unnamed.log": "no collective named: --collective says it",
    }.items():
        assert reasons[name].startswith(reason)
    named = accuracy.accuracy(tmp_path / "unnamed.log", collective="all_reduce")
    assert [row.of for row in named.rows] == ["all_reduce large"]


def test_links_pipes_and_closed_folders_are_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for entry in (folder, elsewhere, folder / "closed"):
        entry.mkdir()
        table(entry / "a.csv", GATHER)
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
    read = measurements.files(folder)
    assert [name for _, name in read.files] == ["a.csv", "link.csv"]
    assert {
        each.source: each.reason.partition(",")[0].partition(":")[0] for each in read.skipped
    } == {
        "gone.csv": "a link to a file that is not here", "linked": "a link to a folder",
        "zero.csv": "a pipe or a device", "pipe.csv": "a pipe or a device",
        "closed": "a folder that cannot be listed",
    }


def test_files_beyond_the_most_that_are_read_are_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "MAX_FILES", 1)
    for name in ("a.csv", "b.csv"):
        table(tmp_path / name, GATHER)
    report = accuracy.accuracy(tmp_path)
    assert ([row.source for row in report.rows], [each.source for each in report.skipped]) == (
        ["a.csv"], ["b.csv"],
    )


def test_a_damaged_file_that_is_asked_for_by_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text('measured.step_time,b\n1,"2\n')
    assert main.main(["accuracy", str(tmp_path / "bad.csv")]) == 2


def test_a_row_in_a_subfolder_is_explained_by_its_place_or_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    table(tmp_path / "sub" / "a.csv", GATHER)
    for name in ("sub/a.csv:2", "sub/a:2", "a.csv:2"):
        assert main.main(["accuracy", str(tmp_path), "--explain", name]) == 0
        assert capsys.readouterr().out.startswith("# sub/a.csv line 2, measured")


def test_the_band_is_wider_by_what_a_row_leaves_open(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", STEP, STEP | {"assumed": "the vocabulary", "widens": "0.1"})
    plain, open_ = accuracy.accuracy(tmp_path).rows
    assert open_.predicted == plain.predicted
    low, high = plain.band
    assert open_.band == (
        pytest.approx(1 - hypot(1 - low, 0.1 / 1.1)), pytest.approx(1 + hypot(high - 1, 0.1))
    )
    assert open_.assumed == ("the vocabulary",)


def test_a_model_that_cannot_fit_is_predicted_with_a_caveat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "a.csv", STEP | {"batch.micro_batch": "256"})
    (row,) = accuracy.accuracy(tmp_path).rows
    assert row.assumed[-1].startswith("the scenario does not fit: ")
    assert main.main(["accuracy", str(tmp_path), "--explain", "a.csv:2"]) == 0
    assert "the scenario does not fit: " in capsys.readouterr().out


def test_a_model_of_other_sizes_is_one_change_and_so_is_a_world_of_another_size(
    tmp_path: Path
) -> None:
    other = {"model.sizes.hidden_size": "1024", "model.sizes.num_heads": "8"}
    nodes = {"cluster.nodes": "2", "strategy.dp_shard": "16"}
    pauses = {"batch.micro_batch": "4", "execution.micro_batch_overhead": "4 ms"}
    table(tmp_path / "a.csv", *(STEP | each for each in ({}, other, nodes, pauses)))
    assert [(pair.field, pair.n) for pair in accuracy.accuracy(tmp_path).pairs] == [
        ("batch.micro_batch", 1), ("model", 1), ("ranks", 1)
    ]


def test_a_log_is_of_the_cluster_that_is_named_or_of_its_gpus_own_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all_reduce.log").write_text(NCCL_LOG)
    asked = ["accuracy", str(tmp_path), "--json"]
    predicted = []
    for more in ([], ["--cluster", "p5"], ["--cluster", "dgx-h100"], ["--cluster", "hgx-h800"]):
        assert main.main([*asked, *more]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        predicted.append(row["predicted"])
        assert bool(row["assumed"]) == (not more)
    assert len(set(predicted[:3])) == 1  # in a node they are alike
    assert predicted[3] > predicted[0]  # of 18 NVLinks 8 are there
    assert main.main([*asked, "--cluster", "dgx-a100"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["error"]
    assert "ran on NVIDIA H100 80GB HBM3, and dgx-a100 has A100 SXM 80 GB" in error
    (tmp_path / "all_reduce.log").write_text(NCCL_LOG.replace("H100 80GB HBM3", "X100"))
    assert main.main(asked) == 2
    (error,) = json.loads(capsys.readouterr().out)["error"]
    assert "no preset has the GPU 'NVIDIA X100'" in error
    assert main.main([*asked, "--cluster", "dgx-h10"]) == 2


def test_the_slope_of_errors_says_how_much_of_the_hidden_time_is_missing() -> None:
    """Steps that are measured longer by a tenth of what they hide, and one of a shared network."""
    rows = [
        replace(row(1.0, 1.0 / (1 - 0.1 * hidden)), hidden=hidden) for hidden in (0.0, 0.2, 0.4)
    ]
    shared = replace(row(1.0, 3.0), hidden=0.9, of="shared network")
    slope = accuracy.by_hidden([*rows, shared])
    assert slope is not None
    assert (slope.n, slope.slope) == (3, pytest.approx(-0.1))
    assert accuracy.by_hidden(rows[:1]) is None
