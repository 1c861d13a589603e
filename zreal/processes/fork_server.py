"""The fork server, from which ranks are forked: its process, how it ended, and what ranks do not
import.

A server that is stopped neither starts ranks nor tells how they end, so nothing that waits for it
returns. It is killed then: ranks end with it, and the next launch starts another.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from typing import Any

from zsim.io.system.processes import STOPPED, is_stopped

CLOSING_S = 1.0
"""Seconds between the end of a large process's connections and its exit status."""
LOOK_S = 0.25
"""Seconds between two looks at the server."""
STOPPED_S = 1.0
"""Seconds for which the server may be stopped: Ctrl-Z and fg stop and continue it shortly before or
after its controller."""
START_S = 180.0
"""Seconds that the server may take to start all ranks. It loads torch first, from a cold disk in a
minute."""
REASONS: dict[int, str] = {}
"""Servers that were killed here, by process id, with the reason as text."""


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


@contextmanager
def watched_server(all_started: threading.Event) -> Iterator[None]:
    """Context manager that kills a server once it is stopped, or has not started all ranks in
    time. It runs in a thread, since a launch waits for the server without a limit."""
    over = threading.Event()
    watch = threading.Thread(target=_watch_server, args=(all_started, over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch_server(all_started: threading.Event, over: threading.Event) -> None:
    begin = running_at = time.monotonic()
    while not over.wait(LOOK_S):
        pid, now = server_pid(), time.monotonic()
        if pid is None or not is_stopped(pid):
            running_at = now
        reason = ""
        if now - running_at > STOPPED_S:
            reason = f"a server {STOPPED}, and ended"
        elif now - begin > START_S and not all_started.is_set():
            reason = f"a server that did not start all ranks within {START_S:g} s, and was ended"
        if pid is not None and reason and pid not in REASONS:
            REASONS[pid] = reason
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def server_end(*, patience_s: float = 0.0) -> str:
    """The end of the fork server as text; "" while it runs. The next launch starts another.

    `patience_s`: seconds to wait for its exit status, which comes after its connections close.
    """
    pid, limit = server_pid(), time.monotonic() + patience_s
    try:
        while pid is not None:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                return REASONS.get(pid) or (
                    f"a server that exited with code {status.si_status}"
                    if status.si_code == os.CLD_EXITED
                    else f"a server {killed_by(status.si_status)}"
                )
            if time.monotonic() >= limit:
                return ""
            time.sleep(0.02)
    except ChildProcessError:
        return "it ended"
    return ""


def killed_by(number: int) -> str:
    """The signal that killed a process, as text."""
    hints: dict[int, str] = {
        signal.SIGKILL: " (often the system's out-of-memory killer)",
        signal.SIGABRT: " (gloo's end where a rank sends more bytes than this one awaits)",
    }
    hint = hints.get(number, "")
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}{hint}"
