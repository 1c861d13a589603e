"""A search of a gradient for infinities and no numbers: its largest and its smallest element tell.

Source: deepspeed/runtime/utils.py (has_inf_or_nan) and torch's isfinite.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.training_options import DTYPE_NBYTES


def searched(*, dtype: str) -> Iterator[MemoryEvent]:
    """One element of the gradient's `dtype`, and flags, twice; then both answers as one."""
    for end in ("largest", "smallest"):
        element = Alloc(f"infinities.{end}", "temporaries", DTYPE_NBYTES[dtype])
        made = [
            Alloc("infinities.equal", "temporaries", 1),
            Alloc("infinities.size", "temporaries", element.nbytes),
            Alloc("infinities.unequal", "temporaries", 1),
        ]
        yield from (element, *made, Alloc(f"infinities.{end}.finite", "temporaries", 1))
        yield from (Free(alloc.buffer) for alloc in (*made, element))
    both, answer = (Alloc(f"infinities.{name}", "temporaries", 1) for name in ("both", "none"))
    yield from (both, Free("infinities.largest.finite"), Free("infinities.smallest.finite"))
    yield from (answer, Free(both.buffer), Free(answer.buffer))


def searching_kernels(numel: int, *, dtype: str) -> tuple[Kernel, ...]:
    """The kernels of that search, each of which reads the gradient."""
    return (Kernel("norm", numel, numel * DTYPE_NBYTES[dtype], dtype),) * 2
