"""Time of a step without meter and recorder, which inspect every operator and slow it severalfold.

Steps run back to back on all ranks, as in training. The clock is read once the device has finished
the step.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist

from zreal.testbed.namespaces import IN_TESTBED, INTERFACE
from zsim.calibration.machine.machine_load import Window, others_share

LEAST_TIMED, MOST_TIMED = 3, 100
"""Steps whose median is the step time, at least and at most."""
TIMED_S = 0.5
"""Seconds that the timed steps take together, within those numbers. A single gloo step of a few
milliseconds varies by a quarter; the median of fifty by a few percent."""
NUM_WARMUP = 2
"""Untimed steps before them, since ranks reach the first unmetered step at different times."""
HEADERS = 14 + 20 + 32
"""Bytes of a packet before its data: Ethernet, IPv4, TCP with timestamps. A packet is what the
interface counts, which may be longer than a frame."""
METHOD = (
    f"median of {LEAST_TIMED} to {MOST_TIMED} steps that neither meter nor recorder watches, the "
    f"largest of any rank"
)
"""Description of the measurement in a Run's provenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Nanoseconds of each timed step, and what a mean one sends and how busy the machine was.

    `bytes_sent` are without headers, and 0 outside of a testbed, where no interface is a rank's
    own. `others_share` is the share of the machine's cores that other work took meanwhile; None
    where that is not known.
    """

    times_ns: tuple[int, ...]
    bytes_sent: int
    others_share: float | None

    @property
    def ns(self) -> int:
        """The step time: the median, at least 1."""
        return max(1, median_low(self.times_ns))


def timed(step: Callable[[], object], *, device: str) -> StepCost:
    """Time and wire bytes of some calls of `step`, a whole training step, on every rank as many.

    The process group must exist.
    """
    last = 1
    for _ in range(NUM_WARMUP):
        start = time.perf_counter_ns()
        step()
        _synchronize(device)
        last = time.perf_counter_ns() - start
    slowest = _over_ranks(last, device, dist.ReduceOp.MAX)
    number = min(MOST_TIMED, max(LEAST_TIMED, int(TIMED_S * 1e9 / slowest)))
    dist.barrier()
    times, sent, window = [], bytes_on_the_wire(), Window()
    for _ in range(number):
        start = time.perf_counter_ns()
        step()
        _synchronize(device)
        times.append(time.perf_counter_ns() - start)
    load = window.load()
    dist.barrier()
    sent = (bytes_on_the_wire() - sent) // number
    share = None
    if device == "cpu" and load is not None:
        own = _of_this_node(load.own_ns)
        share = others_share(load.wall_ns, own, load.machine_ns)
    return StepCost(times_ns=tuple(times), bytes_sent=sent, others_share=share)


def bytes_on_the_wire() -> int:
    """Bytes that this rank's host has sent by its interface's counters, less the headers of every
    packet; 0 outside of a testbed."""
    if IN_TESTBED not in os.environ:
        return 0
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        counters = {name.strip(): text for name, _, text in (line.partition(":") for line in file)}
    sent = counters[INTERFACE].split()
    return int(sent[8]) - HEADERS * int(sent[9])


def _of_this_node(value: int) -> int:
    """The sum of the values of all ranks on this rank's node."""
    values: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, (platform.node(), value))
    return sum(own for node, own in filter(None, values) if node == platform.node())


def _over_ranks(value: int, device: str, op: dist.ReduceOp.RedOpType) -> int:
    """The sum or the maximum of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op)
    return int(tensor.item())


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
