"""The present machine measured by real ranks: its file, and a verdict on time that stands on it."""

import json
import os

import pytest

from tests.support.folders import SCENARIOS
from zsim.calibration.machine import machine_file
from zsim.cli import calibrate_here
from zsim.cli.main import main
from zsim.runs import registry

pytestmark = pytest.mark.gloo


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(machine_file.CACHE, str(tmp_path))
    return tmp_path


def test_validate_judges_the_time_of_a_machine_that_was_measured(cache, capsys):
    """Agreement itself is not asserted: it depends on what else this machine does."""
    scenario = str(SCENARIOS / "parity" / "ddp-mlp-2.toml")
    assert main(["validate", scenario, "--require", "time"]) == 1
    *_, verdict = capsys.readouterr().out.splitlines()
    assert "time not checked: cpu-gloo is not calibrated here" in verdict
    assert verdict.endswith("; FAILED: --require time")
    assert main(["calibrate", "--here", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["file"] == str(machine_file.cached(2))
    main(["validate", scenario, "--json", "--require", "time"])
    result = json.loads(capsys.readouterr().out)
    reason = result["not_checked"].pop("time", "")
    assert result["not_checked"] == {}
    assert "time" in result["checked"]
    assert reason == ""
    assert result["provenance"]["predicted"]["calibration"] == "calibrated"


def test_validate_measures_the_machine_at_its_first_use(cache, capsys, monkeypatch):
    """Other tests may run beside it: it says so, widens the band, and keeps no file."""
    monkeypatch.delenv(calibrate_here.OFF)
    main(["validate", str(SCENARIOS / "parity" / "ddp-mlp-2.toml"), "--json"])
    printed = capsys.readouterr()
    calibration = json.loads(printed.out)["provenance"]["predicted"]["calibration"]
    assert "note: measuring this machine with 2 ranks, once" in printed.err
    assert calibration == "calibrated"
    kept = machine_file.cached(2).exists()
    assert kept != ("the band is widened to ±" in printed.err)
    assert kept != machine_file.beside_others(machine_file.cached(2)).exists()


def test_a_machine_with_too_many_ranks_is_not_measured(cache, capsys):
    ranks = calibrate_here.MOST_RANKS_A_CORE * (os.cpu_count() or 1) + 1
    assert calibrate_here.at_first_use(registry.find("gloo"), ranks) is None
    assert f"times are not judged: {ranks} ranks on" in capsys.readouterr().err


def test_here_goes_with_no_files_and_with_its_own_options(capsys):
    for arguments in (["--here", "--from", "a.csv"], [], ["--from", "a.csv", "--quick"]):
        assert main(["calibrate", *arguments]) == 2
        assert "either --from FILE… or --here" in capsys.readouterr().err
