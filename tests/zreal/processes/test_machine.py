"""The present machine measured by real ranks: its file, and a verdict on time that stands on it."""

import json
import os

import pytest

from tests.support.folders import SCENARIOS
from zsim.calibration.machine import here, machine_file, request
from zsim.cli.commands.calibration import calibrate_here
from zsim.cli.main import main
from zsim.runs import registry

pytestmark = pytest.mark.gloo


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(machine_file.CACHE, str(tmp_path))
    return tmp_path


def test_a_machine_is_measured_at_its_first_use_or_when_asked_and_times_are_judged_then(
    cache, capsys, monkeypatch
):
    """Agreement itself is not asserted: it depends on what else this machine does."""
    scenario = str(SCENARIOS / "parity" / "ddp-mlp-2.toml")
    judged = ["validate", scenario, "--json", "--require", "time"]
    assert main(judged[:2] + judged[3:]) == 1
    *_, verdict = capsys.readouterr().out.splitlines()
    assert "time not checked: cpu-gloo is not calibrated here" in verdict
    assert verdict.endswith("; FAILED: --require time")

    measure, made = here.calibrated, []

    def measured_once(*arguments, **more):
        made.extend([] if made else [measure(*arguments, **more)])
        return made[0]

    monkeypatch.setitem(request.BUDGET_S, True, 3.0)
    monkeypatch.setattr(here, "calibrated", measured_once)
    monkeypatch.delenv(calibrate_here.OFF)
    main(judged)
    printed = capsys.readouterr()
    assert "note: measuring this machine with 2 ranks, once" in printed.err
    require_judged(json.loads(printed.out))
    kept = machine_file.cached(2).exists()
    assert kept != ("the band is widened to ±" in printed.err)
    assert kept != machine_file.beside_others(machine_file.cached(2)).exists()

    assert main(["calibrate", "--here", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["file"] == str(machine_file.cached(2))
    main(judged)
    printed = capsys.readouterr()
    assert "measuring" not in printed.err
    require_judged(json.loads(printed.out))


def require_judged(verdict):
    """The time of the verdict stands on a calibrated machine."""
    assert verdict["not_checked"] == {}
    assert "time" in verdict["checked"]
    assert verdict["provenance"]["predicted"]["calibration"] == "calibrated"


def test_a_machine_with_too_many_ranks_is_not_measured(cache, capsys):
    ranks = calibrate_here.MOST_RANKS_A_CORE * (os.cpu_count() or 1) + 1
    assert calibrate_here.at_first_use(registry.find("gloo"), ranks) is None
    assert f"times are not judged: {ranks} ranks on" in capsys.readouterr().err


def test_here_goes_with_no_files_and_with_its_own_options(capsys):
    for arguments in (["--here", "--from", "a.csv"], [], ["--from", "a.csv", "--quick"]):
        assert main(["calibrate", *arguments]) == 2
        assert "either --from FILE… or --here" in capsys.readouterr().err
