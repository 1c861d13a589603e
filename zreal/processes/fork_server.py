"""The process that ranks are forked from: which it is, and how it ended."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import forkserver

CLOSING_S = 1.0
"""How long a process whose connections are closed may take to end: a large one closes them well
before the system says so."""


def server_pid() -> int | None:
    """The fork server's process, None before the first one."""
    pid: int | None = vars(forkserver)[
        "_forkserver"
    ]._forkserver_pid  # private: Python has no other name for it
    return pid


def server_end(*, patience_s: float = 0.0) -> str:
    """How the fork server ended, in words, or "" where it runs; it is our child, and whoever
    launches next starts another.

    `patience_s`: its connections close before the system says that it is over.
    """
    pid, limit = server_pid(), time.monotonic() + patience_s
    try:
        while pid is not None:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return (
                    f"it exited with code {ended.si_status}"
                    if ended.si_code == os.CLD_EXITED
                    else f"it was {killed(ended.si_status)}"
                )
            if time.monotonic() >= limit:
                return ""
            time.sleep(0.02)
    except ChildProcessError:
        return "it ended"
    return ""


def killed(number: int) -> str:
    """By which signal, in words."""
    hint = " (often the system's out-of-memory killer)" if number == signal.SIGKILL else ""
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}{hint}"
