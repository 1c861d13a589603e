"""`zsim import` writes a scenario that runs, and says what it left out."""

from __future__ import annotations

import json

import pytest

from zsim.cli.main import main

CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "steps_per_print": 1,
}
ANSWERS = ["--model", "gpt-tiny", "--cluster", "cpu-gloo", "--ranks", "2", "--sequence-length",
           "64"]


@pytest.fixture
def config(tmp_path):
    """The path of a ds_config."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def test_what_is_written_can_be_run(config, tmp_path, capsys):
    out = str(tmp_path / "mine.toml")
    assert main(["import", "deepspeed", config, *ANSWERS, "-o", out]) == 0
    printed = capsys.readouterr()
    assert "ignored, " in printed.out
    assert "steps_per_print" in printed.out
    assert printed.err == f"wrote {out}; zsim run simulates it\n"
    assert main(["run", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"] == "mine"


def test_without_a_kind_the_content_tells_it_and_toml_is_printed(config, tmp_path, capsys):
    assert main(["import", config, *ANSWERS, "--set", "optimizer.learning_rate=0.5"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "mine.toml").write_text(text)
    assert "learning_rate = 0.5" in text
    assert main(["show", str(tmp_path / "mine.toml")]) == 0


def test_json_has_scenario_ignored_and_assumed(config, capsys):
    assert main(["import", config, *ANSWERS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"kind", "scenario", "ignored", "assumed"}
    assert told["scenario"]["strategy"] == {"name": "deepspeed2"}


@pytest.mark.parametrize(("arguments", "said"), [
    (["import", "deepspeed"], "expected a file of deepspeed, found none"),
    (["import", "kineto", "x.json", "--model", "gpt-tiny"], "--model: expected no such option"),
    (["import", "deepspeed", "x.json", "--save", "run.json"], "--save: expected no such option"),
    (["import", "nowhere.json"], "nowhere.json: no such file"),
    (["import", "nowhere"], "nowhere: no such file"),
    (["import", "deepspeed", "nowhere"], "nowhere: no such file"),
    (["import", "kineto", "nowhere"], "found no such file"),
    (["explain", "nowhere"], "found no such file"),
    (["accuracy", "nowhere"], "found no such file"),
    (["calibrate", "--from", "nowhere"], "found no such file"),
    (["compare", "nowhere", "nowhere"], "found no such file"),
    (["sweep", "nowhere"], "found no such file"),
    (["show", "nowhere"], "nowhere: no such file"),
    (["import", "deepspeed", "x.json", "--set", "mine"], "expected KEY=VALUE"),
])
def test_usage_that_cannot_work_is_refused(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
