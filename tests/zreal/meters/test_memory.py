"""The meter against storages whose sizes are known: born, resized, shared by views, looked away
from, and gone."""

from __future__ import annotations

import gc

import torch

from zreal.meters.memory import MemoryMeter


def test_a_storage_counts_from_its_birth_to_its_end_and_once_for_all_its_views() -> None:
    with MemoryMeter(log=True) as meter:
        whole = torch.empty(100)
        part = whole[:10].view(2, 5)
        assert meter.allocated == 400
        del whole
        assert meter.allocated == 400
        del part
        assert meter.allocated == 0
    assert meter.peak == 400
    assert [delta for _, delta in meter.events or []] == [400, -400]


def test_a_temporary_is_in_the_peak_and_not_in_what_is_left() -> None:
    x = torch.ones(8)
    with MemoryMeter() as meter, meter.span() as span:
        y = (x + 1) * 2
    assert (span.start, span.peak, span.end) == (0, 64, 32)
    assert y.sum() == 32


def test_resizing_a_storage_frees_and_allocates() -> None:
    with MemoryMeter(log=True) as meter:
        tensor = torch.empty(64)
        tensor.untyped_storage().resize_(0)
        assert meter.allocated == 0
        tensor.untyped_storage().resize_(256)
    assert [delta for _, delta in meter.events or []] == [256, -256, 256]


def test_tensors_from_before_count_when_they_are_watched() -> None:
    before = torch.empty(5, dtype=torch.bfloat16)
    with MemoryMeter() as meter:
        meter.watch(before)
        assert meter.allocated == 10
        del before
        gc.collect()
        assert meter.allocated == 0


def test_what_is_made_while_looking_away_counts_nothing_then_or_later() -> None:
    with MemoryMeter() as meter:
        with meter.uncounted():
            inputs = torch.empty(1000)
        view = inputs[:10]
        assert (meter.allocated, meter.peak) == (0, 0)
        del inputs, view
        assert meter.allocated == 0


def test_the_meter_of_a_gpu_counts_nothing_of_host_memory() -> None:
    """AdamW's step counters lie there, and what is offloaded."""
    with MemoryMeter(device="cuda") as meter:
        counter = torch.zeros(4)
        counter.untyped_storage().resize_(64)
        meter.watch(counter)
    assert (meter.allocated, meter.peak) == (0, 0)
