"""Kernels whose elements CUDA takes one by one, by torch 2.13's TensorIterator.cpp and
CUDALoops.cuh.

Others have operands that coalesce to one dimension without gaps, in the kernel's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.watched_calls import WatchedCalls
from zreal.tracing.kernels import kernel


def made_singly(run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Elements that the last kernel of `run` takes one by one, and its result."""
    singly = [0]

    def see(*call: Any) -> None:
        work = kernel(*call, device="cuda")
        singly.extend([] if work is None else [work.singly])

    with WatchedCalls(see):
        result = run()
    return singly[-1], result


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def image() -> Tensor:
    return f32(2, 4, 3, 3).to(memory_format=torch.channels_last)


def mask(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


LOADED_TOGETHER: dict[str, Callable[[], Tensor]] = {
    "alike": lambda: f32(4, 8) + f32(4, 8),
    "a batch of 1": lambda: f32(1, 4, 8) + f32(4, 8),
    "permuted alike": lambda: f32(4, 8).t() + f32(4, 8).t(),
    "slice of rows": lambda: f32(8, 8)[2:4] * 2,
    "number on the host": lambda: f32(4, 8) * torch.tensor(2.0),
    "in place": lambda: f32(4, 8).mul_(f32(4, 8)),
    "channels_last": lambda: image() + image(),
    "condition": lambda: torch.where(mask(4, 8), f32(4, 8), f32(4, 8)),
    "mask": lambda: f32(4, 8).masked_fill(mask(4, 8), 0.0),
    "copy to two bytes": lambda: f32(4, 8).bfloat16(),
}
ONE_BY_ONE: dict[str, Callable[[], Tensor]] = {
    "bias": lambda: f32(4, 8) + f32(8),
    "column": lambda: f32(4, 8) * f32(4, 1),
    "permuted otherwise": lambda: f32(8, 4).t() + f32(4, 8),
    "stride": lambda: f32(4, 16)[:, ::2] * 2,
    "slice of columns": lambda: f32(4, 16)[:, :8] * 2,
    "mixed dtypes": lambda: f32(4, 8) + bf16(4, 8),
    "mixed dtypes in place": lambda: bf16(4, 8).add_(f32(4, 8)),
    "factor of bool": lambda: f32(4, 8) * mask(4, 8),
    "number for where": lambda: torch.where(mask(4, 8), f32(4, 8), 0.0),
    "mask of a row": lambda: f32(4, 8).masked_fill_(mask(8), 0.0),
    "expand": lambda: f32(1, 8).expand(4, 8) + 1,
    "channels_last beside contiguous": lambda: image() + f32(2, 4, 3, 3),
    "copy to four bytes": lambda: bf16(4, 8).float(),
    "copy of integers": lambda: torch.zeros(4, 8, dtype=torch.int64).bfloat16(),
    "copy between dtypes of two bytes": lambda: bf16(4, 8).half(),
    "copy of permuted elements": lambda: f32(4, 8).t().contiguous(),
}


@pytest.mark.parametrize("case", LOADED_TOGETHER)
def test_several_elements_are_loaded_at_once(case: str) -> None:
    assert made_singly(LOADED_TOGETHER[case])[0] == 0


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_elements_are_taken_one_by_one(case: str) -> None:
    singly, result = made_singly(ONE_BY_ONE[case])
    assert singly == result.numel()
