"""Products of float32 factors: as they are, and in TF32, each with an efficiency of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.cluster.devices import devices, load_device
from zsim.engine.costs.kernel_time import (
    is_misaligned,
    kernel_ns,
    multiplied_in,
    problems,
    product_s,
)
from zsim.engine.execution import Execution
from zsim.ir.ops import Kernel

A100 = load_device("a100-40")
ALONE = Execution(products="alone")
TF32 = Execution(products="alone", float32_products="tf32")


def product(size: int, dtype: str = "float32") -> Kernel:
    nbytes = 3 * size**2 * (4 if dtype == "float32" else 2)
    return Kernel("linear", 2 * size**3, nbytes, dtype, shape=(1, size, size, size))


@pytest.mark.parametrize(("execution", "dtype", "published"), [
    (ALONE, "float32", (19.05,)), (TF32, "float32", (123.68, 145.4)),
    (ALONE, "bfloat16", (259.2, 291.77)),
])
def test_large_products_alone_are_as_fast_as_published_on_a100(execution, dtype, published):
    """FlagPerf on A100-SXM-40GB: its benchmark and the vendor's own tool, between which we are."""
    rate = 2 * 16384**3 / kernel_ns(product(16384, dtype), A100, execution) / 1e3
    assert 0.95 * min(published) <= rate <= 1.05 * max(published)


def test_float32_has_an_efficiency_of_its_own_or_that_of_all_products():
    half = replace(A100, matmul_efficiency=A100.matmul_efficiency / 2)
    large = product(8192)
    assert kernel_ns(large, half) == kernel_ns(large, A100)
    bare = replace(half, float32_efficiency=None)
    assert kernel_ns(large, bare) > 1.9 * kernel_ns(large, A100)
    assert half.efficiency_of("float32") == "float32_efficiency"
    assert bare.efficiency_of("float32") == half.efficiency_of("float16") == "matmul_efficiency"


def test_a_short_product_of_float32_loses_less_to_its_tiles_start_and_end():
    """Scores of heads of 64: they move twice the bytes at a sixteenth of the rate."""
    deep, short = (product_s((192, 1024, 1024, k), A100, "float32") for k in (8192, 64))
    steps = A100.matmul_prologue / 8
    assert deep / short == pytest.approx((8192 + steps) / (64 + steps))


def test_tf32_changes_products_of_float32_alone():
    assert multiplied_in(product(64), TF32) == "tf32"
    assert multiplied_in(product(64), ALONE) == "float32"
    assert multiplied_in(product(64, "bfloat16"), TF32) == "bfloat16"
    sums = Kernel("residual", 0, 10**9, "float32")
    assert kernel_ns(sums, A100, TF32) == kernel_ns(sums, A100, ALONE)


def test_tensor_cores_load_tf32_in_units_of_four_elements():
    assert is_misaligned((1, 4096, 50257, 768), "tf32")
    assert not is_misaligned((1, 4096, 50260, 768), "tf32")
    assert not is_misaligned((1, 4096, 50257, 768), "float32")


def test_devices_without_tf32_are_refused_by_name():
    none = [name for name in devices() if any(problems(TF32, load_device(name)))]
    assert none == ["cpu-core", "v100-32"]
    assert [*problems(TF32, load_device("v100-32"))] == [
        "execution.float32_products: expected ieee, or a device with products in TF32, found "
        "V100 SXM2 32 GB"
    ]


def test_a_slowed_device_has_less_of_all_arithmetic_and_its_memory_as_before():
    slowed = A100.slowed(0.5)
    for dtype in ("float32", "tf32", "bfloat16", "float16", "float8"):
        assert slowed.efficiency(dtype) == A100.efficiency(dtype) / 2
    assert slowed.attention["flash2"].rate == A100.attention["flash2"].rate // 2
    assert slowed.memory_efficiency == A100.memory_efficiency
    assert load_device("cpu-core").slowed(0.5).float32_efficiency is None
