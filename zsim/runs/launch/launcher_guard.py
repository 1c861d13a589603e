"""A process beside a launcher, which ends it with its group once its controller is gone: `python
launcher_guard.py PID`, whose standard input the controller alone holds.

The system closes a pipe however a process ends, also by SIGKILL. It must import nothing of this
package, so that it starts in milliseconds.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

END_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_S = 0.05


@contextmanager
def guarded(pid: int) -> Iterator[None]:
    """Context manager in which the process group `pid` ends when this process does."""
    command = [sys.executable, "-I", "-S", __file__, str(pid)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.kill()  # before its input closes
        guard.communicate()


def main() -> None:
    """Wait for the controller's end, then end the group."""
    pid = int(sys.argv[1])
    sys.stdin.buffer.read()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)  # launchers pass it on to their ranks
        limit = time.monotonic() + END_S
        while time.monotonic() < limit:
            os.killpg(pid, 0)
            time.sleep(POLL_S)
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
