"""Time of a step without meter and recorder, which inspect every operator and slow it severalfold.

Steps run back to back on all ranks, as in training. The clock is read once the device has finished
the step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist

from zreal.namespaces import IN_TESTBED, INTERFACE

NUM_TIMED = 3
"""Steps whose median is the step time."""
NUM_WARMUP = 1
"""Untimed steps before them, since ranks reach the first unmetered step at different times."""
HEADERS = 14 + 20 + 32
"""Bytes of a packet before its data: Ethernet, IPv4, TCP with timestamps. A packet is what the
interface counts, which may be longer than a frame."""
METHOD = (
    f"median of {NUM_TIMED} steps that neither meter nor recorder watches, the largest of any rank"
)
"""Description of the measurement in a Run's provenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Median nanoseconds of a step, at least 1, and bytes without headers that a mean one sends.

    They are 0 outside of a testbed, where no interface is a rank's own."""

    ns: int
    bytes_sent: int


def timed(step: Callable[[], object], *, device: str) -> StepCost:
    """Time and wire bytes of `NUM_TIMED` calls of `step`, a whole training step.

    The process group must exist.
    """
    for _ in range(NUM_WARMUP):
        step()
    _synchronize(device)
    dist.barrier()
    times, sent = [], bytes_on_the_wire()
    for _ in range(NUM_TIMED):
        start = time.perf_counter_ns()
        step()
        _synchronize(device)
        times.append(time.perf_counter_ns() - start)
    dist.barrier()
    sent = (bytes_on_the_wire() - sent) // NUM_TIMED
    return StepCost(ns=max(1, median_low(times)), bytes_sent=sent)


def bytes_on_the_wire() -> int:
    """Bytes that this rank's host has sent by its interface's counters, less the headers of every
    packet; 0 outside of a testbed."""
    if IN_TESTBED not in os.environ:
        return 0
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        counters = {name.strip(): text for name, _, text in (line.partition(":") for line in file)}
    sent = counters[INTERFACE].split()
    return int(sent[8]) - HEADERS * int(sent[9])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
