"""What a step takes when nobody watches it: the meter and the recorder look at every operator, and
make a step several times as long.

Steps run back to back on all ranks, as in training. The clock is read when the device has done what
the step gave it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median_low

import torch
import torch.distributed as dist

TIMED = 3
WARM = 1
"""Steps that are not timed: the first without meter and recorder comes after something else, and
ranks come to it from all sides."""
WORDS = f"median of {TIMED} steps that neither meter nor recorder watches, the largest of any rank"


def step_time_ns(step: Callable[[], object], *, device: str) -> int:
    """The median of `TIMED` calls of `step`, which is one whole step of training. The process group
    must exist."""
    for _ in range(WARM):
        step()
    _synchronize(device)
    dist.barrier()
    times = []
    for _ in range(TIMED):
        begin = time.perf_counter_ns()
        step()
        _synchronize(device)
        times.append(time.perf_counter_ns() - begin)
    return max(1, median_low(times))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
