"""Products in 8 bits by recipe: which products they are, and the casts of their factors.

A linear layer makes three products of input, weight and the output's gradient, so that each factor
is in two of them. Half of what its casts move counts to each. Bytes are counted on the kernels of
Transformer Engine and torchao, as their public code and documentation have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import NamedTuple

from zsim.cluster.devices import Device
from zsim.engine.execution import Execution
from zsim.ir.ops import LINEARS, Kernel


class Recipe(NamedTuple):
    """Bytes for each element, and kernels, of the casts of one factor for both of its products.

    An input or a gradient, `activation_…`, comes from a kernel that torch.compile extends by what
    it reads of it. A `weight_…` is read anew. The `rate` of products is a share of that with one
    scale for each factor.
    """

    activation_nbytes: int
    weight_nbytes: int
    activation_kernels: int = 0
    weight_kernels: int = 0
    rate: float = 1.0


RECIPES: Mapping[str, Recipe] = {
    "delayed": Recipe(activation_nbytes=4, weight_nbytes=4),
    "tensorwise": Recipe(
        activation_nbytes=4, weight_nbytes=8, activation_kernels=2, weight_kernels=4
    ),
    "rowwise": Recipe(
        activation_nbytes=6, weight_nbytes=10, activation_kernels=1, weight_kernels=3, rate=0.95
    ),
    "mx": Recipe(activation_nbytes=4, weight_nbytes=6, activation_kernels=1, weight_kernels=2),
}
"""Recipes by name.

- delayed: Transformer Engine's, with the scale of steps before. Each element is read, written, and
  written transposed.
- tensorwise: torchao's, with the scale of the tensor itself. The largest of a weight is read
  before; its forward and backward cast it apart. One more kernel joins the parts of each largest.
- rowwise: torchao's, with a scale for each row along which a product sums. That is another
  dimension in the other product, so a factor is written transposed in two bytes, read and cast.
  Its kernels have 90 to 100 % of tensorwise's rate (pytorch issue 147971).
- mx: torchao's MXFP8, with a scale for each 32 elements, which are cast for both products apart.
"""
EAGER_CAST_NBYTES, EAGER_CAST_KERNELS = 33, 11
"""Bytes for each element, and kernels, of one cast of torchao without torch.compile.

Counted in bytes on torchao.float8, tensorwise, dynamic. The calls move: |x| 4, its largest 2, x in
float32 6, times the scale 8, clamped 8, in 8 bits 5. Five kernels more make the scale. Each product
casts both of its factors anew."""
BLOCK_SCALED = 100
"""Compute capability from which tensor cores multiply factors with scales of blocks."""


def problems(execution: Execution, device: Device) -> Iterator[str]:
    """Refusals of products in 8 bits that `device` does not have, or whose casts are not known."""
    capability = device.runtime.capability if device.runtime else 0
    if execution.float8 and not device.float8:
        yield f"execution.float8: expected a device with products of 8 bits, found {device.name}"
    elif execution.float8 == "mx" and capability < BLOCK_SCALED:
        yield (
            f"execution.float8: expected tensorwise or rowwise, for products with scales of blocks "
            f"begin with Blackwell, found {device.name}"
        )
    if execution.float8_casts == "eager" and (
        execution.compile or execution.recipe not in ("delayed", "tensorwise")
    ):
        yield (
            "execution.float8_casts: expected fused, for eager ones are those of float8 without "
            "compile, tensorwise"
        )


def in_eight_bits(kernel: Kernel, execution: Execution) -> bool:
    """True for a linear's product where the scenario asks for 8 bits."""
    return (
        bool(execution.float8)
        and kernel.operator in LINEARS
        and bool(kernel.shape)
        and kernel.dtype in ("bfloat16", "float16")
    )


def cast_nbytes(kernel: Kernel, execution: Execution) -> int:
    """Bytes of this product's share in the casts of both its factors; 0 for another kernel."""
    if not in_eight_bits(kernel, execution):
        return 0
    count, m, n, k = kernel.shape
    if execution.float8_casts == "eager":
        return EAGER_CAST_NBYTES * count * k * (m + n)
    casts = RECIPES[execution.recipe]
    second = casts.activation_nbytes if kernel.transposed else casts.weight_nbytes
    return count * k * (casts.activation_nbytes * m + second * n) // 2


def cast_kernels(kernel: Kernel, execution: Execution) -> int:
    """The number of kernels that cast the factors of a product, beside those that they are part of;
    0 for another kernel."""
    if not in_eight_bits(kernel, execution):
        return 0
    if execution.float8_casts == "eager":
        return 2 * EAGER_CAST_KERNELS
    casts = RECIPES[execution.recipe]
    second = casts.activation_kernels if kernel.transposed else casts.weight_kernels
    return ceil((casts.activation_kernels + second) / 2)
