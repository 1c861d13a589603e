"""The present machine measured by real ranks: its file, and a verdict on time that stands on it."""

import json

import pytest

from tests.support.folders import SCENARIOS
from zsim.calibration.machine import machine_file
from zsim.cli.main import main

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
    assert ("time" in result["checked"]) != reason.startswith("other work took ")
    assert result["provenance"]["predicted"]["calibration"] == "calibrated"


def test_here_goes_with_no_files_and_with_its_own_options(capsys):
    for arguments in (["--here", "--from", "a.csv"], [], ["--from", "a.csv", "--quick"]):
        assert main(["calibrate", *arguments]) == 2
        assert "either --from FILE… or --here" in capsys.readouterr().err
