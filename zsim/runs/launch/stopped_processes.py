"""Stopped processes of a launcher: they cannot answer its SIGTERM, for which torchrun waits 30 s.

They are ended as the launcher would in the end. What it has not started, or not asked to end, is
left alone. Ranks on other nodes are their own launcher's.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from zsim.io.system.processes import STOPPED, awaits, descendants, is_stopped

PATIENCE_S = 1.0
"""Seconds in which somebody may let a stopped process continue that was asked to end."""


@dataclass(slots=True)
class StoppedProcesses:
    """Stopped processes below the launcher `pid`, and itself, as they are seen."""

    pid: int
    _since: dict[int, float] = field(default_factory=dict)
    _ended: list[int] = field(default_factory=list)

    def end(self) -> None:
        """End those that have been stopped for a second since they were asked to end."""
        now, alive = time.monotonic(), (self.pid, *descendants(self.pid))
        deaf = [pid for pid in alive if is_stopped(pid) and awaits(pid, signal.SIGTERM)]
        self._since = {pid: self._since.get(pid, now) for pid in deaf}
        for pid, since in self._since.items():
            if now - since >= PATIENCE_S and pid not in self._ended:
                self._ended.append(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def __str__(self) -> str:
        return "; ".join(f"process {pid} was {STOPPED}, and was ended" for pid in self._ended)
