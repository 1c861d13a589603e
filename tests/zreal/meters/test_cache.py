"""The record of CUDA's caching allocator: of statistics and segments as torch tells them, and on a
GPU of real steps."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from zreal.meters.cache import cache_record, recorded
from zsim.ir.run import CacheRecord
from zsim.memory.allocator.caching_allocator import CachingAllocator


def statistics(current: int, peak: int, *, blocks: int, reserved: int = 2**21) -> dict[str, int]:
    """Statistics under the names of torch.cuda.memory_stats."""
    return {
        "requested_bytes.all.current": current, "requested_bytes.all.peak": peak,
        "allocated_bytes.all.peak": blocks, "active_bytes.all.peak": blocks + 512,
        "reserved_bytes.all.peak": reserved, "num_alloc_retries": 4,
    }


def test_start_and_peak_are_of_the_step_that_takes_most() -> None:
    steps = [
        (statistics(100, 100, blocks=512), statistics(100, 900, blocks=1024)),
        (statistics(100, 100, blocks=512), statistics(90, 950, blocks=1536, reserved=2**22)),
        (statistics(300, 300, blocks=512), statistics(90, 960, blocks=1024)),
    ]
    segments = [
        {"blocks": [{"size": size, "state": state} for size, state in blocks]}
        for blocks in (
            [(1024, "active_allocated"), (512, "inactive")], [(4096, "active_pending_free")],
            [(2048, "inactive")],
        )
    ]
    assert recorded(steps, segments) == CacheRecord(
        start_bytes=100, peak_bytes=950, allocated_bytes=1536, active_bytes=2048,
        reserved_bytes=2**22, segments=3, largest_free_bytes=2048,
    )


def test_a_cpu_has_no_such_record_and_takes_no_step_for_it() -> None:
    assert cache_record(lambda: pytest.fail("a step"), device="cpu") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_record_of_a_gpu_has_the_bytes_of_its_tensors() -> None:
    """Two tensors above the start, of which the allocator's rules know the blocks."""
    replayed = CachingAllocator()
    for nbytes in (1000, 3000):
        replayed.allocate(nbytes, "compute")

    def step() -> None:
        first = torch.empty(1000, dtype=torch.uint8, device="cuda")
        second = torch.empty(3000, dtype=torch.uint8, device="cuda")
        del first, second

    record = cache_record(step, device="cuda")
    assert record is not None
    assert record.peak_bytes - record.start_bytes == 4000
    assert record.allocated_bytes >= replayed.active
    assert record.reserved_bytes >= replayed.reserved
    assert record.segments >= 1
