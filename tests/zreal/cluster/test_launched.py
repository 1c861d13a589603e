"""`zsim validate --launch`: a job step for each scenario, by a launcher that sets srun's variables.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from tests.support.folders import PARITY, ROOT
from zreal.processes.descendants import running
from zsim.cli.main import main
from zsim.runs.launch import launched

pytestmark = pytest.mark.gloo

TWO, FOUR = str(PARITY / "fsdp2-mlp-2.toml"), str(PARITY / "zero3-mlp-4.toml")
OWN = "tests.zreal.own.own_modules:"
OWN_FILE = ROOT / "tests/zreal/own/own_modules.py"
SRUN = f"{sys.executable} {ROOT / 'tests/support/launchers/slurm.py'} {{ranks}} {{worker}}"


def validated(*scenarios: str, launch: str, folder: Path, more: tuple[str, ...] = ()) -> int:
    """The exit code of `zsim validate --launch`."""
    patient = ("--timeout", "500")  # as a busy machine may need
    return main([
        "validate", *scenarios, "--launch", launch, "--save", str(folder), *patient, *more
    ])


def test_a_scenario_that_fails_stops_no_other_and_what_has_run_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher of two ranks contradicts the mesh of four; the other's ranks build a module of
    the user's own."""
    report, agrees = tmp_path / "report.xml", "agrees in order, bytes, memory and numerics"
    own, two_ranks = ("--module", f"{OWN}perceptron"), SRUN.replace("{ranks}", "2")
    more = ("--junit", str(report), *own)
    assert validated(FOUR, TWO, launch=two_ranks, folder=tmp_path, more=more) == 1
    printed = capsys.readouterr()
    assert "fsdp2-mlp-2: sim against gloo" in printed.out
    assert agrees in printed.out
    assert "zsim: zero3-mlp-4: zero3-mlp-4: expected a result of each of 4 ranks in" in printed.err
    log = (tmp_path / "zero3-mlp-4" / "launcher.log").read_text()
    assert "zero3-mlp-4: expected 4 ranks, as the scenario's mesh has, found 2" in log
    suite = Xml.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "1")
    assert "time not checked" in suite.findtext(".//system-out", "")

    assert (tmp_path / "fsdp2-mlp-2.measured.json").is_file()
    assert validated(TWO, launch="false {worker}", folder=tmp_path, more=own) == 0
    printed = capsys.readouterr()
    assert agrees in printed.out
    assert f"taken from {tmp_path / 'fsdp2-mlp-2'}" in printed.err
    assert validated(TWO, launch="gather", folder=tmp_path, more=own) == 0
    assert agrees in capsys.readouterr().out
    assert validated(TWO, launch="gather", folder=tmp_path) == 1  # of the scenario's own model
    assert "found 2 of another scenario or module" in capsys.readouterr().err

    edited = tmp_path / "edited"
    shutil.copytree(tmp_path / "fsdp2-mlp-2", edited / "fsdp2-mlp-2")
    assert validated(TWO, launch="false {worker}", folder=edited, more=own) == 0
    asked = edited / "fsdp2-mlp-2" / "asked.json"
    told = json.loads(asked.read_text())
    assert told["module's source"] == sha256(OWN_FILE.read_bytes()).hexdigest()[:12]
    asked.write_text(json.dumps(told | {"module's source": "of an earlier day"}))
    assert validated(TWO, launch="false {worker}", folder=edited, more=own) == 1
    assert capsys.readouterr().err.count("taken from") == 1
    sampled = (*own, "--numerics", "sampled")  # not asked for then: ranks run again
    assert validated(TWO, launch="false {worker}", folder=tmp_path, more=sampled) == 1
    assert "taken from" not in capsys.readouterr().err


def test_a_single_scenario_that_cannot_run_is_an_error_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second time, the report of the first is replaced."""
    report = tmp_path / "report.xml"
    for launch in ("false {worker}", "gather"):
        assert validated(TWO, launch=launch, folder=tmp_path, more=("--junit", str(report))) == 1
        assert "expected a result of each of 2 ranks" in capsys.readouterr().err
        error = Xml.parse(report).getroot().find(".//error")
        assert error is not None
        assert "expected a result of each of 2 ranks" in error.get("message", "")


def test_a_rank_that_the_system_kills_is_named_and_the_rest_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is killed once its first phase is in its file."""
    killer = tmp_path / "killer.py"
    killer.write_text(
        "import os, signal, subprocess, sys, time\n"
        "rank = subprocess.Popen(sys.argv[2:])\n"
        "while os.environ['SLURM_PROCID'] == '1' and not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.001)\n"
        "if os.environ['SLURM_PROCID'] == '1':\n"
        "    rank.send_signal(signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: rank.terminate())\n"
        "sys.exit(rank.wait() and 1)\n"
    )
    own = tmp_path / "fsdp2-mlp-2"
    launch = SRUN.replace("{worker}", f"{sys.executable} {killer} {own / 'rank-1.json'} {{worker}}")
    assert validated(TWO, launch=launch, folder=tmp_path) == 1
    error = capsys.readouterr().err
    assert "rank 1: expected every rank to finish, found no end, and" in error
    assert f"see {own / 'launcher.log'}" in error
    assert "marked incomplete" in error
    written = {file: file.read_bytes() for file in own.glob("rank-*.json")}
    assert validated(TWO, launch="gather", folder=tmp_path) == 1
    assert "rank 1: expected every rank to finish" in capsys.readouterr().err
    assert written == {file: file.read_bytes() for file in own.glob("rank-*.json")} != {}


def test_a_module_that_one_rank_never_makes_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--module", f"{OWN}hanging_on_rank_1", "--timeout", "20")
    assert validated(TWO, launch=SRUN, folder=tmp_path, more=more) == 1
    error = capsys.readouterr().err
    assert "rank 1: expected all 2 ranks within 10 s, found 1 of them" in error
    assert f"building the module {OWN}hanging_on_rank_1 (" in error
    assert "in hanging" in error


def test_a_job_that_waits_in_a_queue_has_a_limit_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch, more = "sh -c 'sleep 60' {worker}", ("--queue-timeout", "1")
    assert validated(TWO, launch=launch, folder=tmp_path, more=more) == 1
    ended = "the launcher was ended after 1 s in which no rank had started (--queue-timeout)"
    assert ended in capsys.readouterr().err


def test_the_limit_of_a_run_begins_with_its_first_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "START_S", 0.0)
    own = tmp_path / "fsdp2-mlp-2"
    left = "sleep 3604 & echo $! > left; wait"  # a shell ends before what it waits for
    launch = f"sh -c 'cd {tmp_path}; sleep 1; touch {own}/started; {left}' {{worker}}"
    begin = time.monotonic()
    assert validated(TWO, launch=launch, folder=tmp_path, more=("--timeout", "1")) == 1
    assert "was ended 1 s after the first rank had started" in capsys.readouterr().err
    assert time.monotonic() - begin >= 2
    pid = int((tmp_path / "left").read_text())
    while pid in {process.pid for process in running()}:  # the suite's limit ends it
        time.sleep(0.05)


@pytest.mark.parametrize(("launch", "message"), [
    ("srun -N 2", "--launch: expected {worker} as a word of its own, found srun -N 2"),
    ("srun {gpus} {worker}", "found {gpus}"), ("srun 'a {worker}", "found No closing quotation"),
    ("echo {} {worker}", "found {}"), ("echo {ranks:x} {worker}", "{{ and }} are literal braces"),
    ("no-such-launcher {worker}", "found no-such-launcher: No such file or directory"),
])
def test_a_command_that_starts_no_ranks_is_refused(
    launch: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(TWO, launch=launch, folder=tmp_path) == 2
    assert message in capsys.readouterr().err


def test_a_launch_needs_a_shared_folder_and_a_backend_of_real_ranks(
    capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--against", "gloo"], "--launch: expected --save FOLDER, which all nodes see"),
        (["--against", "fake"], "--launch: expected --against gloo or nccl, found fake"),
    ):
        assert main(["validate", TWO, "--launch", "srun {worker}", *arguments]) == 2
        assert message in capsys.readouterr().err
