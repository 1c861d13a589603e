"""Gradient clipping by the global norm: what torch.nn.utils.clip_grad_norm_ allocates, and the work
of it.

One norm per gradient, stacked; sharded ones are squared, all-reduced and rooted, element by
element, before the total. All of this is a few bytes per parameter; the gradients are scaled in
place. Seen with a dispatch-level meter on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.ir.buffers import Buffer, norm_part
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.training_options import DTYPE_NBYTES

NORMS, CLIP = "gradient_norm", "gradient_clip"
"""The units of the ops that clipping is made of."""


def norms_memory(count: int, *, dtype: str, sharded: bool) -> Iterator[MemoryEvent]:
    """The norms of `count` gradients, stacked; squared where they are `sharded`, and all of it
    kept, or the total made at once."""
    element = DTYPE_NBYTES[dtype]
    yield from (Alloc(norm_part(i), "temporaries", element) for i in range(count))
    yield Alloc(norm_part("stack"), "temporaries", element * count)
    if sharded:
        yield Alloc(norm_part("squares"), "temporaries", element * count)
        return
    yield from _total(norm_part("stack"), count, element)


def reduced_memory(count: int, *, dtype: str) -> tuple[MemoryEvent, ...]:
    """The all-reduce of the squares is out of place."""
    return (Alloc(norm_part("reduced"), "communication", DTYPE_NBYTES[dtype] * count),)


def clip_memory(count: int, *, dtype: str, sharded: bool) -> Iterator[MemoryEvent]:
    """The coefficient, min(1, max_norm / (norm + ε)), by which gradients are scaled in place."""
    element = DTYPE_NBYTES[dtype]
    if sharded:
        yield Alloc(norm_part("roots"), "temporaries", element * count)
        yield Free(norm_part("squares"))
        yield Free(norm_part("reduced"))
        yield from _total(norm_part("roots"), count, element)
    for name in ("sum", "reciprocal", "quotient"):
        yield Alloc(norm_part(name), "temporaries", element)
    yield Free(norm_part("reciprocal"))
    yield Free(norm_part("sum"))
    yield Alloc(norm_part("coefficient"), "temporaries", element)
    yield from (Free(norm_part(name)) for name in ("quotient", "coefficient", "total"))


def _total(source: Buffer, count: int, element: int) -> Iterator[MemoryEvent]:
    yield Alloc(norm_part("total"), "temporaries", element)
    if source != norm_part("stack"):
        yield Free(source)
    yield Free(norm_part("stack"))
    yield from (Free(norm_part(i)) for i in range(count))


def norms_kernels(numels: Sequence[int], *, dtype: str) -> tuple[Kernel, ...]:
    """Every gradient is read once."""
    return (Kernel("norm", 2 * sum(numels), sum(numels) * DTYPE_NBYTES[dtype], dtype),)


def clip_kernels(numels: Sequence[int], *, dtype: str) -> tuple[Kernel, ...]:
    """Every gradient is read and written once."""
    return (Kernel("scale", sum(numels), 2 * sum(numels) * DTYPE_NBYTES[dtype], dtype),)
