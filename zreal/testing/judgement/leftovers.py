"""Processes that the body of a test has started and left behind.

They were below a rank in Linux's tree of processes, are in its session or have its environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from zreal.processes.descendants import command_of, running
from zreal.processes.rank_status import FORKED

MARK = "ZREAL_RANKS"
"""Environment variable of the ranks of a run, and of all that they start."""
OWN_END_S = 0.5
"""Seconds in which processes may end that notice the end of their rank, as multiprocessing's do."""
Known = Collection[tuple[int, int]]
"""Processes that were seen below the ranks, each by id and beginning."""


def leftovers(mark: str, *, sessions: Collection[int], known: Known) -> list[str]:
    """Commands of the processes that outlive the ranks of a run."""
    limit = time.monotonic() + OWN_END_S
    while (left := list(_left(mark, sessions, known))) and time.monotonic() < limit:
        time.sleep(0.02)
    return [command for command in map(_command, left) if command]


def end_leftovers(mark: str, *, sessions: Collection[int], known: Known) -> None:
    """Kill the processes that outlive the ranks of a run, and those that they start meanwhile."""
    for _ in range(3):
        for pid in _left(mark, sessions, known):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _left(mark: str, sessions: Collection[int], known: Known) -> Iterator[int]:
    for process in running():
        is_known = process.session in sessions or (process.pid, process.began) in known
        if is_known or _is_marked(process.pid, mark):
            yield process.pid


def _is_marked(pid: int, mark: str) -> bool:
    with suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _command(pid: int) -> str:
    text = command_of(pid)
    return f"a fork of the rank, process {pid}" if FORKED in text else text
