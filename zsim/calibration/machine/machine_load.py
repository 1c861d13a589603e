"""The share of a machine's cores that work other than a run's takes while the run is timed.

A step beside other work takes longer than the machine does; so a timed window says who had the
cores. Linux alone tells it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Columns of /proc/stat in which no work ran: idle, and waiting for input or output. Time that a
hypervisor took away counts as work, guests' time is in user's."""
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Nanoseconds of a window: by the clock, of this process's threads, of all work on all
    cores."""

    wall_ns: int
    own_ns: int
    machine_ns: int


class Window:
    """A window that begins when it is made."""

    def __init__(self) -> None:
        self._began = _now()

    def load(self) -> Load | None:
        """The load since then; None where the system does not tell it."""
        began, now = self._began, _now()
        if began is None or now is None:
            return None
        return Load(*(after - before for before, after in zip(began, now, strict=True)))


def others_share(wall_ns: int, own_ns: int, machine_ns: int) -> float:
    """Share of all cores that others took, where the ranks of a run took `own_ns` in all."""
    cores = os.cpu_count() or 1
    return min(1.0, max(0.0, (machine_ns - own_ns) / (cores * max(1, wall_ns))))


def _now() -> tuple[int, int, int] | None:
    """Nanoseconds by the clock, of this process and of all work since the start; None elsewhere
    than on Linux."""
    try:
        ticks = [int(value) for value in STAT.read_text().split("\n", 1)[0].split()[1:]]
        second = 10**9 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    busy = sum(value for column, value in enumerate(ticks[:COLUMNS]) if column not in IDLE)
    return time.perf_counter_ns(), time.process_time_ns(), busy * second
