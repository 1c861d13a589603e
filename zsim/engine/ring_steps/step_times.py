"""Times of a ring's steps from the time of the whole collective.

The closed form of a ring of N ranks is T = launch + Σ (α + c/β) over its steps (Thakur,
Rabenseifner, Gropp 2005). NCCL's and gloo's times are calibrated as a whole, and no such sum. So a
step has its bytes' time at the ring's bandwidth β, and an equal part of what is left of T as its
latency. The sum is T to the nanosecond. This module knows neither links nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RingStepTime(NamedTuple):
    """Nanoseconds of a step: latency, and the pace at which its largest chunk passes the ring's
    narrowest hop."""

    latency_ns: int
    pace_ns: int


def step_times(
    sizes: Sequence[int], *, total_ns: int, bytes_per_s: int
) -> tuple[RingStepTime, ...]:
    """The times of steps whose largest chunks have `sizes` bytes; they sum to `total_ns`.

    NCCL was measured to use some links better than its tuner believes. Where the bytes alone would
    take longer than `total_ns`, steps share that by their bytes, and have no latency.

    An all-gather of 400 bytes over a ring of 4 has three steps of 100 bytes. Here they go at 1
    byte/ns, and the third has 1 ns more of latency, which is what rounding leaves.

    >>> step_times([100, 100, 100], total_ns=307, bytes_per_s=10**9)
    (RingStepTime(latency_ns=2, pace_ns=100), RingStepTime(latency_ns=2, pace_ns=100), \
RingStepTime(latency_ns=3, pace_ns=100))
    >>> step_times([100, 100, 100], total_ns=299, bytes_per_s=10**9)
    (RingStepTime(latency_ns=0, pace_ns=99), RingStepTime(latency_ns=0, pace_ns=100), \
RingStepTime(latency_ns=0, pace_ns=100))
    """
    wire = [-(-nbytes * 10**9 // bytes_per_s) for nbytes in sizes]
    left = total_ns - sum(wire)
    if left < 0:
        return tuple(RingStepTime(0, own) for own in shared_out(total_ns, wire))
    latencies = shared_out(left, [1] * len(sizes))
    return tuple(RingStepTime(*each) for each in zip(latencies, wire, strict=True))


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, each rounded so that they sum to it.

    >>> shared_out(10, [1, 1, 1])
    [3, 3, 4]
    """
    whole, before, parts = sum(weights), 0, []
    for weight in weights:
        parts.append(total * (before + weight) // whole - total * before // whole)
        before += weight
    return parts
