"""The caching allocator of a rank's GPU over steady steps that neither meter nor recorder watches.

Its peaks are those of torch's own statistics, its segments and free blocks those of its snapshot.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zreal import torch_private
from zsim.ir.run import CacheRecord

NUM_WARMUP, NUM_STEPS = 2, 3
"""Steps before those whose peaks count, and the number of those."""
FREE = "inactive"
"""State of a block that no tensor and no stream uses."""

Statistics = Mapping[str, int]
"""Figures by name, as torch.cuda.memory_stats returns them."""


def cache_record(step: Callable[[], object], *, device: str) -> CacheRecord | None:
    """The record over some calls of `step`, a training step; None on a CPU.

    Memory that construction and numerics left in the cache is given back first. So are cuBLAS's
    workspaces for streams of earlier runs in this process.
    """
    if device == "cpu":
        return None
    gc.collect()
    torch_private.clear_cublas_workspaces()
    torch.cuda.empty_cache()
    for _ in range(NUM_WARMUP):
        step()
    steps = []
    for _ in range(NUM_STEPS):
        _settle()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_stats()
        step()
        torch.cuda.synchronize()
        steps.append((start, torch.cuda.memory_stats()))
    return recorded(steps, torch.cuda.memory_snapshot())


def _settle() -> None:
    """Wait for all streams and take back the blocks that they used.

    The allocator takes a block that another stream used back in the next allocation after its
    event. Until then its bytes count as asked for, and as active.
    """
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")


def recorded(
    steps: Sequence[tuple[Statistics, Statistics]], segments: Sequence[Mapping[str, Any]]
) -> CacheRecord:
    """The record of statistics at both ends of each step, and of the segments after the last.

    Start and peak are those of the step that takes most; other peaks are the highest of any step.
    """
    start, end = max(steps, key=lambda step: _peak(step[1]) - _current(step[0]))
    ends = [end for _, end in steps]
    return CacheRecord(
        start_bytes=_current(start), peak_bytes=_peak(end),
        allocated_bytes=max(_peak(each, "allocated_bytes") for each in ends),
        active_bytes=max(_peak(each, "active_bytes") for each in ends),
        reserved_bytes=max(_peak(each, "reserved_bytes") for each in ends),
        releases=ends[-1]["num_alloc_retries"] - steps[0][0]["num_alloc_retries"],
        segments=len(segments), largest_free_bytes=max(_free(segments), default=0),
    )


def _peak(statistics: Statistics, counter: str = "requested_bytes") -> int:
    return statistics[f"{counter}.all.peak"]


def _current(statistics: Statistics) -> int:
    return statistics["requested_bytes.all.current"]


def _free(segments: Iterable[Mapping[str, Any]]) -> Iterable[int]:
    """Bytes of each free block."""
    return (
        block["size"] for segment in segments for block in segment["blocks"]
        if block["state"] == FREE
    )
