"""Processes that the body of a test has started and left behind.

They are in the session of a rank, or have its environment: Linux shows both.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "ZREAL_RANKS"
"""Environment variable of the ranks of a run, and of all that they start."""
OWN_END_S = 0.5
"""Seconds in which processes may end that notice the end of their rank, as multiprocessing's do."""


def leftovers(mark: str, *, sessions: Sequence[int]) -> list[str]:
    """Commands of the processes that outlive the ranks of a run."""
    limit = time.monotonic() + OWN_END_S
    while (left := list(_processes(mark, sessions))) and time.monotonic() < limit:
        time.sleep(0.02)
    return [command for command in map(_command, left) if command]


def end_leftovers(mark: str, *, sessions: Sequence[int]) -> None:
    """Kill the processes that outlive the ranks of a run, and those that they start meanwhile."""
    for _ in range(3):
        for pid in _processes(mark, sessions):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _processes(mark: str, sessions: Sequence[int]) -> Iterator[int]:
    marked = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (
                (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            )
            if state not in "ZX" and (
                int(session) in sessions
                or marked in (folder / "environ").read_bytes().split(b"\0")
            ):
                yield int(folder.name)


def _command(pid: int) -> str:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace").replace(
            "\0", " "
        ).strip()
    return ""
