"""Last words of a rank: at its time limit, and at SIGTERM, by which launchers end the other ranks
when one fails. A thread waits for both, since the main one may be inside a collective."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from zreal.modules.own.user_code import current_location
from zreal.processes.rank_status import BUILDING, REFERENCE
from zreal.testbed.namespaces import LIBC, PR_SET_PDEATHSIG
from zsim.runs.launch.launched_failure import HANG, SLOW

TERMINATED = "ended by SIGTERM"


def end_with_torchrun() -> None:
    """Have Linux end this rank when torchrun does, which starts ranks in sessions of their own.

    Other launchers' daemons end their ranks themselves.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(
    limit_s: float, *, last_collective: Callable[[], str], gets_on: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Call `say` with the reason when this process is told to end, or after `limit_s` seconds, and
    then end it.

    `gets_on`: True where it has entered another collective a moment ago.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    # The number of a signal goes to the pipe at once, whichever thread the system interrupts;
    # Python's own handler would wait for the main one.
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    def wait() -> None:
        reason, code = _ended_by(receiver, limit_s, last_collective, gets_on)
        say(reason)
        sys.stderr.flush()
        os._exit(code)

    threading.Thread(target=wait, daemon=True, name="last words").start()


def _ended_by(
    receiver: int, limit_s: float, last_collective: Callable[[], str], gets_on: Callable[[], bool]
) -> tuple[str, int]:
    """The reason for the end, once there is one, and the exit code."""
    ready, *_ = select.select([receiver], [], [], limit_s)
    last = last_collective()
    where = f"last collective: {last}"
    if last.startswith(BUILDING):
        where = f"{last}{current_location()}"
    if ready:
        return f"{TERMINATED}, {where}", 128 + signal.SIGTERM
    kind = SLOW if last == REFERENCE or gets_on() else HANG
    return f"no end within {limit_s:g} s: {kind}, {where}", 1
