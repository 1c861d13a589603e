"""Time of a step without meter and recorder, which inspect every operator and slow it severalfold.

Steps run back to back on all ranks, as in training. The clock is read once the device has finished
the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median_low

import torch
import torch.distributed as dist

NUM_TIMED = 3
"""Steps whose median is the step time."""
NUM_WARMUP = 1
"""Untimed steps before them, since ranks reach the first unmetered step at different times."""
METHOD = (
    f"median of {NUM_TIMED} steps that neither meter nor recorder watches, the largest of any rank"
)
"""Description of the measurement in a Run's provenance."""


def step_time_ns(step: Callable[[], object], *, device: str) -> int:
    """Median duration of `NUM_TIMED` calls of `step`, a whole training step; at least 1 ns.

    The process group must exist.
    """
    for _ in range(NUM_WARMUP):
        step()
    _synchronize(device)
    dist.barrier()
    times = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter_ns()
        step()
        _synchronize(device)
        times.append(time.perf_counter_ns() - start)
    return max(1, median_low(times))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
