"""Factors by which both FSDPs divide gradients around a reduction, and their kernels.

They keep the sums of many ranks within the range of narrow dtypes.
"""

from __future__ import annotations

from zsim.ir.ops import Kernel
from zsim.models.training_options import DTYPE_NBYTES


def division(world_size: int) -> tuple[float, float]:
    """Divisors before and after the reduction: a power of two near the root of `world_size`, and
    the rest.

    Source: torch/distributed/algorithms/_comm_hooks/default_hooks.py,
    DefaultState._get_gradient_predivide_factor.
    """
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return float(before), world_size / before


def divide_kernels(numel: int, *, by: float, dtype: str) -> tuple[Kernel, ...]:
    """A division of `numel` elements in place; none by 1."""
    return (Kernel("divide", numel, 2 * numel * DTYPE_NBYTES[dtype], dtype),) if by > 1 else ()
