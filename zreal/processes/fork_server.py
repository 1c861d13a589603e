"""The fork server, from which ranks are forked: its process, how it ended, and what ranks do not
import."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

CLOSING_S = 1.0
"""Seconds between the end of a large process's connections and its exit status."""


@contextmanager
def without_main() -> Iterator[None]:
    """Processes started inside do not import the user's script, which would start ranks again.

    multiprocessing imports it in each process for functions defined there; a rank's is not.
    """
    script: dict[str, Any] = vars(sys.modules["__main__"])
    spec, file = script.get("__spec__"), script.pop("__file__", None)
    script["__spec__"] = None
    try:
        yield
    finally:
        script["__spec__"] = spec
        if file is not None:
            script["__file__"] = file


def server_pid() -> int | None:
    """The fork server's process id, None before the first launch."""
    # private: Python has no other name for it
    pid: int | None = vars(forkserver)["_forkserver"]._forkserver_pid
    return pid


def server_end(*, patience_s: float = 0.0) -> str:
    """The end of the fork server as text; "" while it runs. The next launch starts another.

    `patience_s`: seconds to wait for its exit status, which comes after its connections close.
    """
    pid, limit = server_pid(), time.monotonic() + patience_s
    try:
        while pid is not None:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                return (
                    f"it exited with code {status.si_status}"
                    if status.si_code == os.CLD_EXITED
                    else f"it was {killed_by(status.si_status)}"
                )
            if time.monotonic() >= limit:
                return ""
            time.sleep(0.02)
    except ChildProcessError:
        return "it ended"
    return ""


def killed_by(number: int) -> str:
    """The signal that killed a process, as text."""
    hint = " (often the system's out-of-memory killer)" if number == signal.SIGKILL else ""
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}{hint}"
