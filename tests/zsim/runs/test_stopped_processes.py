"""Stopped processes of a launcher are ended once it has asked them to end, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from zsim.io.system.processes import awaits, descendants, is_stopped
from zsim.runs.launch import stopped_processes
from zsim.runs.launch.stopped_processes import StoppedProcesses

LAUNCHER = """
import subprocess, sys
ranks = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
print(*(rank.pid for rank in ranks), flush=True)
print(*(rank.wait() for rank in ranks), flush=True)
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    """A process with three below it, whose ids are on its standard output."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    yield process
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def stop(pid: int, *, ask: bool) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid))
    if ask:
        os.kill(pid, signal.SIGTERM)
        assert awaits(pid, signal.SIGTERM)


def test_what_is_stopped_and_was_asked_to_end_is_ended_after_a_second(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher.stdout is not None
    deaf, halted, running = map(int, launcher.stdout.readline().split())
    with subprocess.Popen(["sleep", "600"]) as foreign:
        for pid, ask in ((deaf, True), (halted, False), (foreign.pid, True)):
            stop(pid, ask=ask)
        stopped = StoppedProcesses(launcher.pid)
        stopped.end()
        assert (str(stopped), is_stopped(deaf)) == ("", True)
        monkeypatch.setattr(stopped_processes, "PATIENCE_S", 0.0)
        stopped.end()
        wait_until(lambda: deaf not in descendants(launcher.pid))
        stopped.end()
        assert sorted(descendants(launcher.pid)) == sorted((halted, running))
        assert (is_stopped(halted), is_stopped(running), is_stopped(foreign.pid)) == (
            True, False, True
        )
        foreign.kill()
    assert str(stopped) == (
        f"process {deaf} was stopped (as by SIGSTOP or a debugger), and was ended"
    )


def test_one_that_continues_in_time_is_left_to_end_by_itself(
    launcher: subprocess.Popen[str]
) -> None:
    assert launcher.stdout is not None
    rank, *_ = map(int, launcher.stdout.readline().split())
    stop(rank, ask=True)
    stopped = StoppedProcesses(launcher.pid)
    stopped.end()
    os.kill(rank, signal.SIGCONT)
    wait_until(lambda: rank not in descendants(launcher.pid))
    stopped.end()
    assert str(stopped) == ""
