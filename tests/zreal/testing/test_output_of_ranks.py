"""Output of ranks in reports and artifacts, and what bodies leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from tests.zreal.testing.conftest import RankSessions
from zreal.testing.judgement.output import sections

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo

PRINTING = """
import logging

@pytest.mark.ranks(3)
def test_it(rank):
    for number in range(50):
        print("line", number)
    os.write(2, b"from C")
    if rank.index == 1:
        rank.log("loss", 0.5)
        logging.getLogger("user").warning("careful")
    assert rank.index == 5
"""


def test_a_failing_test_shows_what_its_ranks_printed_alike_output_once(
    sessions: RankSessions
) -> None:
    (report,) = sessions.reports(PRINTING).values()

    own = dict(report.sections)
    assert own.pop("Captured [rank 1] log call").splitlines() == [
        "loss 0.5", "WARNING  user:test_user.py:14 careful"
    ]
    lines = "\n".join(f"line {number}" for number in range(10, 50))
    assert own == {
        "Captured [ranks 0-2] stdout call": f"… (whole under --zero-artifacts)\n{lines}",
        "Captured [ranks 0-2] stderr call": "from C",
    }


def test_a_crash_is_shown_with_the_users_lines_and_without_what_called_them(tmp_path: Path) -> None:
    user = ["Segmentation fault", '  File "test_user.py", line 3 in crash']
    callers = ['  File "/zreal/testing/on_rank/rank_plugin.py", line 9 in call'] * 50
    file = tmp_path / "rank_0.stderr"
    file.write_text("\n".join([*user, *callers, "Extension modules: torch"]), encoding="utf-8")
    assert list(sections(tmp_path, 1)) == [
        ("[rank 0] stderr", "\n".join([*user, "Extension modules: torch"]))
    ]


def test_output_is_kept_whole_among_artifacts_of_failed_tests_or_of_all(
    sessions: RankSessions
) -> None:
    plugin = ("-p", "zsim.testing.pytest_plugin", "--zero-artifacts=kept")
    passing = "@pytest.mark.ranks(1)\ndef test_passing(rank):\n    print('fine')\n"
    sessions.reports(PRINTING + passing, *plugin)

    def kept() -> list[str]:
        folder = sessions.path / "kept"
        return sorted(
            str(file.relative_to(folder)) for file in folder.rglob("*")
            if file.is_file() and file.name.startswith("rank")
        )

    failed = [f"test_user.py/test_it/rank_{rank}.{name}" for rank in range(3)
              for name in ("log", "stderr", "stdout") if name != "log" or rank == 1]
    assert kept() == failed
    whole = (sessions.path / "kept/test_user.py/test_it/rank_2.stdout").read_text()
    assert whole.splitlines() == [f"line {number}" for number in range(50)]

    sessions.reports(passing, *plugin, "--zero-keep-logs=all")
    assert kept() == [*failed, "test_user.py/test_passing/rank_0.stdout"]


def test_warnings_of_ranks_are_those_of_the_test_and_reports_have_its_size(
    sessions: RankSessions
) -> None:
    sessions.pytester.makepyfile("""
import pytest, warnings

@pytest.mark.ranks(2)
def test_it(rank):
    warnings.warn("old", DeprecationWarning)
""")
    recorder = sessions.pytester.inline_run("-p", "zreal.testing.pytest_plugin", "-W", "default")
    (warned,) = recorder.getcalls("pytest_warning_recorded")
    (report,) = [
        report for report in recorder.getreports("pytest_runtest_logreport")
        if report.when == "call"
    ]

    assert report.passed
    assert warned.warning_message.category is DeprecationWarning
    assert str(warned.warning_message.message) == "old"
    assert Path(warned.warning_message.filename).parent == sessions.path
    assert report.user_properties == [("world_size", 2), ("backend", "gloo")]


LEAVING = """
import multiprocessing, pathlib, subprocess

def sleep():
    time.sleep(3600)

@pytest.mark.ranks(2)
def test_it(rank):
    if rank.index == 0:  # a daemon: neither a child, nor in the session, nor with the environment
        start = "setsid sleep 3601 > /dev/null 2>&1 & echo $!"
        shell = subprocess.run(["/bin/sh", "-c", start], env={}, stdout=subprocess.PIPE)
        pid = int(shell.stdout)
    else:
        child = multiprocessing.get_context("fork").Process(target=sleep)
        child.start()
        pid = child.pid
    pathlib.Path(f"pid_{rank.index}").write_text(str(pid))
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_processes_that_a_body_leaves_are_ended_and_told(sessions: RankSessions) -> None:
    sessions.pytester.makepyfile(test_user=f"import pytest, time\n{LEAVING}")
    recorder = sessions.pytester.inline_run("-p", "zreal.testing.pytest_plugin", "-W", "default")
    told = {
        str(call.warning_message.message) for call in recorder.getcalls("pytest_warning_recorded")
    }

    children = [int((sessions.path / f"pid_{rank}").read_text()) for rank in range(2)]
    head = "a rank left a process behind, which was ended: "
    assert told == {f"{head}sleep 3601", f"{head}a fork of the rank, process {children[1]}"}
    recorder.assertoutcome(passed=1)
    while any(map(_is_running, children)):  # a killed process ends a moment later
        time.sleep(0.05)


def test_a_process_left_where_warnings_are_errors_is_told_without_code_of_ours(
    sessions: RankSessions
) -> None:
    report = sessions.failure("""
import subprocess

@pytest.mark.ranks(2)
def test_it(rank):
    if rank.index == 0:
        subprocess.run(["/bin/sh", "-c", "setsid sleep 3603 > /dev/null 2>&1 &"], check=True)
""")
    assert report == (
        "PytestWarning: a rank left a process behind, which was ended: sleep 3603"
    )


def test_nothing_is_left_when_pytest_is_killed(sessions: RankSessions) -> None:
    sessions.pytester.makepyfile(test_user="""
import os, pathlib, pytest, subprocess, time

@pytest.mark.ranks(2)
def test_it(rank):
    child = subprocess.Popen(["sleep", "3602"], start_new_session=rank.index == 1)
    pathlib.Path(f"pids_{rank.index}").write_text(f"{os.getpid()} {child.pid} .")
    time.sleep(3600)
""")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "zreal.testing.pytest_plugin"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as session:
        files = [sessions.path / f"pids_{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text().endswith(".") for file in files):
            assert session.poll() is None
            time.sleep(0.05)
        session.send_signal(signal.SIGKILL)
    pids = [int(pid) for file in files for pid in file.read_text().split()[:2]]

    while any(map(_is_running, pids)):  # the suite's limit ends it
        time.sleep(0.05)
