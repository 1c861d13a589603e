"""The constants of the caching allocator are those of the headers of the torch that is installed,
CPU wheels included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from zsim.memory.allocator import caching_allocator

HEADER = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"


@pytest.fixture(scope="module")
def header() -> str:
    if not HEADER.exists():
        pytest.skip("this torch comes without its headers")
    text = HEADER.read_text()
    if "kRoundLarge" not in text:
        pytest.skip("this torch keeps the constants in a source file")
    return text


@pytest.mark.parametrize(("constant", "value"), [
    ("kMinBlockSize", caching_allocator.MIN_BLOCK), ("kSmallSize", caching_allocator.SMALL_SIZE),
    ("kSmallBuffer", caching_allocator.SMALL_SEGMENT),
    ("kMinLargeAlloc", caching_allocator.MIN_LARGE), ("kRoundLarge", caching_allocator.ROUND_LARGE),
])
def test_a_constant_is_that_of_torch(header, constant, value):
    assert re.findall(rf"constexpr size_t {constant} = (\d+);", header) == [str(value)]


def test_a_large_segment_is_as_large_as_torch_makes_it_and_blocks_of_any_size_may_be_split(header):
    assert re.findall(r"large_segment_size_\{(\d+)\}", header) == [
        str(caching_allocator.LARGE_SEGMENT)
    ]
    assert "max_split_size_{std::numeric_limits<size_t>::max()}" in header
