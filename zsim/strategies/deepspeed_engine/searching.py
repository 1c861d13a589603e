"""A search of a gradient for infinities and no numbers: its largest and its smallest element tell.

Source: deepspeed/runtime/utils.py (has_inf_or_nan) and torch's isfinite.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.buffers import infinities_part
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.training_options import DTYPE_NBYTES

ENDS = "largest", "smallest"


def searched(*, dtype: str) -> Iterator[MemoryEvent]:
    """One element of the gradient's `dtype`, and flags, twice; then both answers as one."""
    for end in ENDS:
        element = Alloc(infinities_part(end), "temporaries", DTYPE_NBYTES[dtype])
        made = [
            Alloc(infinities_part("equal"), "temporaries", 1),
            Alloc(infinities_part("size"), "temporaries", element.nbytes),
            Alloc(infinities_part("unequal"), "temporaries", 1),
        ]
        yield from (element, *made, Alloc(infinities_part(end, "finite"), "temporaries", 1))
        yield from (Free(alloc.buffer) for alloc in (*made, element))
    both, answer = (Alloc(infinities_part(name), "temporaries", 1) for name in ("both", "none"))
    yield both
    yield from (Free(infinities_part(end, "finite")) for end in ENDS)
    yield from (answer, Free(both.buffer), Free(answer.buffer))


def searching_kernels(numel: int, *, dtype: str) -> tuple[Kernel, ...]:
    """The kernels of that search, each of which reads the gradient."""
    return (Kernel("norm", numel, numel * DTYPE_NBYTES[dtype], dtype),) * 2
