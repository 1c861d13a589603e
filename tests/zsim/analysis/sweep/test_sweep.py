"""Sweeps: the same table by any workers, refused points as rows, interruption, killed workers."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.analysis.sweep import workers
from zsim.analysis.sweep.axes import SweepError
from zsim.cli import terminal
from zsim.cli.main import main
from zsim.io.files import PlaceError
from zsim.memory import fits
from zsim.scenario.plan import planned

BASE = zsim.Scenario(
    model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 16},
    cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "ddp"},
)
AXES = {
    "strategy": [
        {"name": "ddp"}, {"name": "zero3"}, {"name": "fsdp2", "reshard_after_forward": False},
        {"name": "zero3", "depth": 2},
    ],
    "batch.micro_batch": [1, 2],
    "cluster.ranks": [2, 4],
}
SWEEP_FILE = """
scenario = "base.toml"
[axes]
strategy.name = ["ddp", "zero2", "zero3", "fsdp2"]
batch.micro_batch = [1, 2, 3, 4, 5, 6]
cluster.ranks = [2, 3, 4]
"""


@pytest.fixture(scope="module")
def swept() -> zsim.Sweep:
    return zsim.sweep(BASE, AXES, on="here")


def test_a_row_is_what_simulate_and_fit_say(swept: zsim.Sweep) -> None:
    assert len(swept.rows) == 16
    assert [row["point"] for row in swept.rows] == [*range(16)]
    for row in swept.rows[:4]:
        case = BASE.with_(
            batch={"micro_batch": row["batch.micro_batch"]},
            cluster={"ranks": row["cluster.ranks"]},
        )
        assert row["step_time_ns"] == zsim.simulate(case).record.step_time_ns
        assert row["needed_bytes"] == fits.assess(planned(case)).needed.nbytes
        assert row["ranks"] == case.world_size
        assert row["step_time_low_ns"] < row["step_time_ns"] < row["step_time_high_ns"]


def test_a_point_that_cannot_be_is_a_row_that_says_why(swept: zsim.Sweep) -> None:
    refused = [row for row in swept.rows if row["status"] != "ok"]
    assert [row["point"] for row in refused] == [12, 13, 14, 15]
    assert all("strategy.depth: unknown key" in row["reason"] for row in refused)
    assert all(row["step_time_ns"] is None for row in refused)
    assert "4 x Scenario: strategy.depth" in str(swept)


def test_best_and_front_are_those_of_all_rows(swept: zsim.Sweep) -> None:
    able = [row for row in swept.rows if row["verdict"] == "FITS"]
    for row in swept.front:
        assert not any(
            other["needed_bytes"] <= row["needed_bytes"]
            and other["tokens_per_s"] > row["tokens_per_s"] for other in able
        )
    assert swept.best is not None
    assert swept.best["tokens_per_s"] == max(row["tokens_per_s"] for row in able)
    assert swept.best["point"] in {row["point"] for row in swept.front}


@pytest.mark.parametrize("number", [1, 3])
def test_tables_are_byte_identical_by_any_number_of_workers(swept, number: int) -> None:
    pytest.importorskip("joblib")
    other = zsim.sweep(BASE, AXES, on="loky", workers=number)
    assert other.to_csv() == swept.to_csv()
    assert other.to_jsonl() == swept.to_jsonl()


def test_forms_of_the_table(swept: zsim.Sweep, tmp_path) -> None:
    rows = list(csv.DictReader(io.StringIO(swept.to_csv())))
    assert json.loads(rows[8]["strategy"]) == {"name": "fsdp2", "reshard_after_forward": False}
    assert [json.loads(line)["point"] for line in swept.to_jsonl().splitlines()] == [*range(16)]
    parquet = pytest.importorskip("pyarrow.parquet")
    swept.write(tmp_path / "table.parquet")
    table = parquet.read_table(tmp_path / "table.parquet")
    assert table.column("step_time_ns").to_pylist() == [row["step_time_ns"] for row in swept.rows]
    with pytest.raises(SweepError, match=r"\.csv, \.jsonl or \.parquet"):
        swept.write(tmp_path / "table.xlsx")


def test_what_the_journal_has_is_not_computed_again(tmp_path, monkeypatch) -> None:
    out, few = tmp_path / "table.csv", {"batch.micro_batch": [1, 2]}
    zsim.sweep(BASE, few, on="here", out=out)
    journal = tmp_path / "table.csv.journal"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:-1], lines[-1][:50]]))  # cut in its last row
    computed = []
    original = workers.results
    monkeypatch.setattr(
        workers, "results",
        lambda function, tasks, **how: computed.extend(tasks) or original(function, tasks, **how),
    )
    more = {"batch.micro_batch": [1, 2, 3]}
    table = zsim.sweep(BASE, more, on="here", out=out)
    assert [point.values["batch.micro_batch"] for point in computed] == [2, 3]
    assert out.read_text() == table.to_csv() == zsim.sweep(BASE, more, on="here").to_csv()


def kill_itself(task: int) -> int:
    if task == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return task * task


@pytest.mark.parametrize("number", [1, 2])
def test_a_task_that_kills_its_worker_ends_no_other(number: int) -> None:
    pytest.importorskip("joblib")
    told = dict(workers.results(kill_itself, [4, 5, 6], on="loky", workers=number))
    assert told == {0: 16, 1: None, 2: 36}


@pytest.mark.slow  # recorded in zsim/analysis/sweep/README.md
@pytest.mark.filterwarnings("ignore")  # of dask and ray themselves
@pytest.mark.parametrize(("on", "library"), [("dask", "distributed"), ("ray", "ray")])
def test_dask_and_ray_make_the_same_table_and_outlive_a_killed_worker(
    on, library, monkeypatch
) -> None:
    pytest.importorskip(library)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")  # workers load this file
    axes = {"strategy": AXES["strategy"][2:], "batch.micro_batch": [1, 2]}
    table, other = (zsim.sweep(BASE, axes, on=kind, workers=2) for kind in ("loky", on))
    assert other.to_csv() == table.to_csv()
    assert [row["status"] for row in table.rows] == ["ok", "ok", "refused", "refused"]
    told = dict(workers.results(kill_itself, range(8), on=on, workers=2))
    assert told == {task: None if task == 5 else task * task for task in range(8)}


@pytest.mark.parametrize("on", ["spark", "loky:8", "here:a"])
def test_other_workers_are_refused(on: str) -> None:
    with pytest.raises(SweepError, match="loky, here, dask"):
        list(workers.results(abs, [1], on=on))


def test_a_missing_library_is_named_before_anything_is_computed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(SweepError, match=r"pip install 'zsim\[sweep\]'"):
        zsim.sweep(BASE, AXES)


def test_an_interrupted_sweep_goes_on(tmp_path) -> None:
    """SIGINT in the middle: exit code 130, no table, the journal; then the whole table."""
    (tmp_path / "base.toml").write_text(BASE.to_toml())
    (tmp_path / "sweep.toml").write_text(SWEEP_FILE)
    command = [
        sys.executable, "-m", "zsim", "sweep", str(tmp_path / "sweep.toml"), "--on", "here",
        "-o", str(tmp_path / "table.jsonl"),
    ]
    journal = tmp_path / "table.jsonl.journal"
    begun = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE,
                             stdout=subprocess.DEVNULL, text=True)
    while begun.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 3):
        time.sleep(0.01)
    begun.send_signal(signal.SIGINT)
    _, complaint = begun.communicate(timeout=60)
    if begun.returncode == 0:
        pytest.skip("it had ended before the signal came")
    assert begun.returncode == 130
    kept = re.search(r"zsim: interrupted; (\d+) rows kept in (.*); the same", complaint)
    assert kept
    assert kept[2] == str(journal)
    assert not (tmp_path / "table.jsonl").exists()
    done = len(journal.read_text().splitlines()) - 1
    assert int(kept[1]) in (done, done - 1)  # the signal may come between a line and its count
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert f"note: {done} rows taken from {journal}" in again.stderr
    rows = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert 3 <= done < len(rows) == 72
    assert len(journal.read_text().splitlines()) - 1 in (72, 73)  # one may have been cut


def test_the_command_prints_a_table_and_writes_it(tmp_path, capsys) -> None:
    (tmp_path / "base.toml").write_text(BASE.to_toml())
    file = tmp_path / "sweep.toml"
    file.write_text('scenario = "base.toml"\n[axes]\nbatch.micro_batch = [1, 2]\n')
    out = tmp_path / "table.csv"
    assert main(["sweep", str(file), "--on", "here", "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert "2 points: 2 ok" in told.out
    assert "-> 2 " in told.out
    assert "wrote" in told.err
    assert main(["sweep", str(file), "--on", "here", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2
    assert main(["sweep", str(file), "--on", "here", "-o", str(file)]) == 2
    file.write_text('scenario = "base.toml"\n[axes]\nmodle.preset = ["a", "b"]\n')
    assert main(["sweep", str(file), "--on", "here"]) == 2
    assert "axes.modle: expected a key of scenarios, found an unknown one; did you mean model?" in (
        capsys.readouterr().err
    )
    (tmp_path / "folder.csv").mkdir()
    assert main(["sweep", str(file), "--on", "here", "-o", str(tmp_path / "folder.csv")]) == 2


def test_what_fits_is_printed_and_what_does_not_is_counted() -> None:
    base = zsim.Scenario(
        model={"preset": "gpt-2-124m"}, batch={"micro_batch": 1, "sequence_length": 1024},
        cluster={"preset": "dgx-h100", "ranks": 8}, strategy={"name": "fsdp2"},
    )
    table = zsim.sweep(base, {"batch.micro_batch": [1, 2, 4000, -1, -2]}, on="here")
    lines = str(table).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["*", "1"], ["->", "2"]]
    assert lines[4] == "   1 more is out of memory"
    assert [line for line in lines if "OOM" in line] == []
    assert lines[-1].startswith("   2 x Scenario: batch.micro_batch: expected")
    assert lines[-1].endswith("found -1 (others with other numbers)")


def test_a_sweep_is_drawn(swept: zsim.Sweep, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = swept.plot().axes
    drawn = [line for line in axes.lines if line.get_marker() == "o"]
    assert sum(len(line.get_xdata()) for line in drawn) == 12  # four are refused
    front = next(line for line in axes.lines if line.get_label() == "front")
    assert [*front.get_ydata()] == [row["tokens_per_s"] for row in swept.front]
    (tmp_path / "base.toml").write_text(BASE.to_toml())
    file = tmp_path / "sweep.toml"
    file.write_text('scenario = "base.toml"\n[axes]\nbatch.micro_batch = [1, 2]\n')
    command = ["sweep", str(file), "--on", "here", "--plot"]
    assert main([*command, str(tmp_path / "out.svg")]) == 0
    assert "<svg" in (tmp_path / "out.svg").read_text()
    assert main([*command, str(tmp_path / "out.gif")]) == 2
    assert "found .gif" in capsys.readouterr().err


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch, capsys) -> None:
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(terminal, "monotonic", lambda: next(clock))
    told = terminal.telling("sweep: ")
    for number in range(6):
        told(f"{number} of 6")
    assert capsys.readouterr().err == "sweep: 2 of 6\nsweep: 5 of 6\n"


def test_a_full_disk_is_told(tmp_path) -> None:
    (tmp_path / "table.csv.journal").symlink_to("/dev/full")
    with pytest.raises(PlaceError, match="expected room for"):
        zsim.sweep(BASE, {"batch.micro_batch": [1]}, on="here", out=tmp_path / "table.csv")


def test_a_journal_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "table.csv.journal").symlink_to(tmp_path / "none" / "journal")
    with pytest.raises(PlaceError, match=r"table.csv.journal: expected a file that can be written"):
        zsim.sweep(BASE, {"batch.micro_batch": [1]}, on="here", out=tmp_path / "table.csv")
