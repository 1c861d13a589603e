"""Kernels that strategies issue between modules: copies, sums, fills and moves of gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zsim.ir.ops import ACCUMULATE, MOVE_GRADIENT, Kernel
from zsim.models.training_options import DTYPE_NBYTES

MASTER_DTYPE = "float32"
"""Dtype of the optimizer's step: 2-byte parameters have a master copy of it."""


def copy_kernel(numel: int, *, source: str, target: str) -> Kernel:
    """A copy of `numel` elements that may change their dtype. torch vectorises casts to a narrower
    one alone."""
    read, written = DTYPE_NBYTES[source], DTYPE_NBYTES[target]
    singly = numel if read < written else 0
    return Kernel("copy", 0, numel * (read + written), target, singly=singly)


@lru_cache(maxsize=1 << 12)
def move_gradients(numel: int, *, source: str, target: str, reduced_in: str) -> Kernel:
    """A copy of gradients into what is reduced, or back; a cast to something narrower than float32
    is a plain copy, always made."""
    copy = copy_kernel(numel, source=source, target=target)
    return (
        replace(copy, operator=MOVE_GRADIENT)
        if source == target or reduced_in == MASTER_DTYPE
        else copy
    )


def add_kernel(numel: int, *, of: str, to: str) -> Kernel:
    """Elements of dtype `of` added in place to as many of dtype `to`: both read, the sum written.
    """
    nbytes = numel * (DTYPE_NBYTES[of] + 2 * DTYPE_NBYTES[to])
    return Kernel("add", numel, nbytes, to, singly=numel if of != to else 0)


def fill_kernel(numel: int, *, dtype: str) -> Kernel:
    """Zeros written over `numel` elements."""
    return Kernel("fill", 0, numel * DTYPE_NBYTES[dtype], dtype)


@lru_cache(maxsize=1 << 12)
def accumulate_kernel(numel: int, *, of: str, to: str = "") -> Kernel:
    """A gradient of one parameter added to what earlier micro-batches have left of it, in the same
    dtype or another."""
    return replace(add_kernel(numel, of=of, to=to or of), operator=ACCUMULATE)
