"""Processes of this machine as the system shows them in /proc; elsewhere it shows nothing."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
STOPPED = "stopped (as by SIGSTOP or a debugger)"


def is_stopped(pid: int) -> bool:
    """True where the system shows the process as stopped; False where it shows nothing."""
    with suppress(OSError, IndexError):
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False


def awaits(pid: int, number: signal.Signals) -> bool:
    """True where the process has been sent a signal that it has not received yet."""
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            name, _, mask = line.partition(":")
            if name in ("SigPnd", "ShdPnd") and int(mask, 16) >> (number - 1) & 1:
                return True
    return False


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, and those that these have, while their parents live."""
    below, parents = [], [pid]
    while parents:
        parents = [child for parent in parents for child in children(parent)]
        below += parents
    return below


def children(pid: int) -> list[int]:
    """The processes that `pid` has started itself."""
    started: list[int] = []
    for task in (PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # its thread has ended
            started += map(int, task.read_text().split())
    return started


def ticks_asleep(pid: int) -> int | None:
    """Ticks of the clock that a process has taken of cores, where its main thread sleeps now; None
    where it runs or wants to, or the system shows nothing."""
    with suppress(OSError, IndexError, ValueError):
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()
        return int(fields[10]) + int(fields[11]) if state == "S" else None
    return None
