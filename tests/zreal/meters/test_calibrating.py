"""Times of real ranks for calibrate: a step that nobody watches, timed on every rank, in the Run
that --save writes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.folders import SCENARIOS
from zreal import torch_private
from zreal.meters import step_time
from zsim.cli.main import main
from zsim.runs import saved


@pytest.mark.gloo
def test_runs_saved_on_gloo_are_calibrated_on(tmp_path, capsys):
    """Two models, since one alone cannot be left out; one is trained by torch, one by us."""
    names = {"fsdp2-mlp-2": "observer", "zero1-gpt-2-all-reduce": "executor"}
    for name, interpreter in names.items():
        asked = str(SCENARIOS / "parity" / f"{name}.toml")
        assert main([
            "run", asked, "--backend", "gloo", "--save", str(tmp_path / f"{name}.json"), "--json",
        ]) == 0
        told = json.loads(capsys.readouterr().out)
        run = saved.load(tmp_path / f"{name}.json")
        assert run.interpreter == interpreter
        assert (
            run.step_time_ns == max(rank.step_time_ns for rank in run.ranks) == told["step_time_ns"]
        )
        # some hundred operators and several collectives
        assert min(rank.step_time_ns for rank in run.ranks) > 100_000
        assert "neither meter nor recorder" in run.provenance["timed"]
        assert 0 < told["compute_ns"] < max(rank.recorded_step_ns for rank in run.ranks)
        assert 0 < told["exposed_communication_ns"] <= told["communication_ns"]
        assert "time" not in run.provenance["sees"].split()

    files = [str(tmp_path / f"{name}.json") for name in names]
    out = tmp_path / "mine.toml"
    asked = [
        "calibrate", "--from", *files, "--scenarios", str(SCENARIOS), "--out", str(out), "--json"
    ]
    assert main(asked) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert sorted(row["source"] for row in fitted["rows"]) == sorted(
        Path(file).name for file in files
    )
    assert fitted["skipped"] == []
    assert out.read_text().startswith("# calibrated on 2 steps of ")

    # as predicted with that file their times are judged, by the band that their own errors made
    for name in names:
        text = (SCENARIOS / "parity" / f"{name}.toml").read_text()
        assert 'preset = "cpu-gloo"' in text
        mine, predicted = tmp_path / f"{name}.toml", tmp_path / f"{name}-predicted.json"
        mine.write_text(text.replace('preset = "cpu-gloo"', 'file = "mine.toml"'))
        assert main(["run", str(mine), "--save", str(predicted), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        low, high = told["step_time_band_ns"]
        ended = main(["compare", str(predicted), str(tmp_path / f"{name}.json"), "--json"])
        checks = {
            check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]
        }
        check = checks["step time"]
        failed = {name for name, each in checks.items() if each["status"] == "failed"}
        assert failed <= {"step time", "exposed communication", "time by unit"}
        assert ended == int(bool(failed))
        took = saved.load(tmp_path / f"{name}.json").step_time_ns
        assert (told["provenance"]["calibration"], check["predicted"], check["measured"]) == (
            "calibrated", told["step_time_ns"], took,
        )
        if "other work took " in check["detail"]:
            continue  # the suite runs several tests at once
        inside = low <= took <= high
        assert check["status"] == ("ok" if inside else "failed")
        assert check["detail"].startswith(f"{'within' if inside else 'beyond'} the band: "
                                          f"predicted ")
        # as wide as they were off
        assert high / told["step_time_ns"] > 1 / (1 - fitted["width"]) - 0.01


@pytest.mark.gloo
def test_what_a_step_takes_on_an_unknown_machine_is_told_and_not_judged(tmp_path, capsys):
    """No expectation holds the simulator to the time of a machine that nobody has calibrated."""
    text = (SCENARIOS / "parity" / "fsdp2-mlp-2.toml").read_text().partition("[expect]")[0]
    asked = tmp_path / "asked.toml"
    asked.write_text(f'{text}\n[expect]\nstep_time = "<= 1 ns"\nmfu = ">= 99 %"\n')
    assert main(["run", str(asked), "--backend", "gloo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_time_ns"] > 1
    assert [(expectation["found"], expectation["ok"]) for expectation in told["expectations"]] == [
        ("unsupported", None)
    ] * 2


def test_the_first_steps_do_not_count_and_an_interrupted_one_does_not_move_the_median():
    pauses = iter((0.2, 0.15, 0.01, 0.2, 0.01))
    with torch_private.fake_group(rank=0, world_size=2):
        assert dist.is_initialized()
        cost = step_time.timed(lambda: time.sleep(next(pauses)), device="cpu")
    # half a second holds three steps as long as the last untimed one
    assert len(cost.times_ns) == step_time.LEAST_TIMED == 3
    assert 10_000_000 <= cost.ns < 150_000_000
    assert next(pauses, None) is None


def test_short_steps_are_timed_more_often_up_to_a_number():
    with torch_private.fake_group(rank=0, world_size=2):
        cost = step_time.timed(lambda: None, device="cpu")
    assert len(cost.times_ns) == step_time.MOST_TIMED
