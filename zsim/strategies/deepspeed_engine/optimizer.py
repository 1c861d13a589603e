"""The end of a step at stages 1 and 2. A rank takes the norm, clips, and steps its part in float32;
then the flat buffer is all-gathered.

The norm is taken in float64, gradient by gradient, and reduced even where nothing is clipped.
Two-byte gradients may be searched for infinities before. Source:
deepspeed/runtime/zero/stage_1_and_2.py (step, get_grad_norm_direct, has_overflow).
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.buffers import Buffer, infinities_part, norm_part
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import optimizers
from zsim.strategies.building.clipping import NORMS
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES, FlatPartition, Share
from zsim.strategies.deepspeed_engine.searching import searched, searching_kernels
from zsim.strategies.deepspeed_engine.step import KEPT, PADDING

OVERFLOW = "overflow"
WIDE = "float64"
NORM_NBYTES, WIDE_NBYTES = DTYPE_NBYTES[MASTER_DTYPE], DTYPE_NBYTES[WIDE]
GRADIENT = Buffer("master_gradient")
GLOBAL_NORM = norm_part("global")
"""The norm that the engine tells its user. It stays until the next step has its own."""


def optimizer_step(
    step: StepBuilder, flat: FlatPartition, share: Share, *, first: bool
) -> None:
    """Step the rank's part behind all of backward, and gather the flat buffer."""
    step.begin("optimizer")
    after = _search_infinities(step, flat, share) if flat.searches_infinities else []
    normed = step.issue(
        "optimizer", NORMS, waits=after, kernels=tuple(_norm_kernels(flat, share)),
        memory=list(_norms(share)),
    )
    if flat.num_ranks > 1:
        normed = step.issue(
            "all_reduce", NORMS, stream="all_reduce", waits=(normed,), group=AXIS,
            nbytes=NORM_NBYTES, dtype=MASTER_DTYPE,
        )
    stepped = _step(step, flat, share, after=normed, first=first)
    if flat.num_ranks > 1:
        step.issue(
            "all_gather", ROOT, stream="all_gather", waits=(stepped,), group=AXIS,
            nbytes=flat.padded_numel * flat.element, dtype=flat.dtype,
        )
    gone = [Free(norm_part("all"))] if first else [Free(norm_part("all")), Free(norm_part("told"))]
    step.issue("free", ROOT, stream="host", memory=gone)
    step.begin("zero_grad")


def _search_infinities(
    step: StepBuilder, flat: FlatPartition, share: Share
) -> list[int]:
    """Search each gradient, padding too, and tell all ranks; the host reads the answer."""
    parts = [n for n in (*share.pieces, share.padding) if n]
    memory: list[MemoryEvent] = [Alloc(infinities_part("count"), "temporaries", NORM_NBYTES)]
    for _ in parts:
        memory += searched(dtype=flat.dtype)
    flag = Alloc(infinities_part("found"), "temporaries", 1)
    sent = Alloc(infinities_part("sent"), "communication", 1)
    memory += [flag, Free(infinities_part("count")), sent]
    kernels = [
        kernel for numel in parts for kernel in searching_kernels(numel, dtype=flat.dtype)
    ]
    last = step.issue("optimizer", OVERFLOW, kernels=tuple(kernels), memory=memory)
    if flat.num_ranks > 1:
        last = step.issue(
            "all_reduce", OVERFLOW, stream="all_reduce", waits=(last,), group=AXIS, nbytes=1,
            dtype="uint8",
        )
    read = step.issue(
        "host_wait", OVERFLOW, stream="host", waits=(last,),
        memory=[Free(sent.buffer), Free(flag.buffer)],
    )
    return [read]


def _norm_kernels(flat: FlatPartition, share: Share) -> Iterator[Kernel]:
    for numel in share.pieces:
        yield copy_kernel(numel, source=flat.dtype, target=WIDE)
        # memory bounds it: its rate in float64, which no device here has, would not show
        yield Kernel("norm", 2 * numel, WIDE_NBYTES * numel, MASTER_DTYPE)


def _norms(share: Share) -> Iterator[MemoryEvent]:
    """The norm of each gradient of the part, then the sum of their squares in float32."""
    for index, numel in enumerate(share.pieces):
        wide = Alloc(norm_part("wide"), "temporaries", WIDE_NBYTES * numel)
        yield from (wide, Alloc(norm_part(index), "temporaries", WIDE_NBYTES), Free(wide.buffer))
    if count := len(share.pieces):
        yield Alloc(norm_part("stack"), "temporaries", WIDE_NBYTES * count)
        yield Alloc(norm_part("squares"), "temporaries", WIDE_NBYTES * count)
        yield Free(norm_part("stack"))
        yield Alloc(norm_part("sum"), "temporaries", WIDE_NBYTES)
        yield Free(norm_part("squares"))
    yield Alloc(norm_part("reduced"), "communication", NORM_NBYTES)
    if share.pieces:
        yield Free(norm_part("sum"))


def _step(
    step: StepBuilder, flat: FlatPartition, share: Share, *, after: int, first: bool
) -> int:
    """Flatten the gradients of the part in float32, clip them, and step."""
    training = flat.training
    settings = training.optimizer
    memory: list[MemoryEvent] = [*_total(share), Alloc(
        GLOBAL_NORM if first else norm_part("told"), "temporaries", NORM_NBYTES
    )]
    flattened, gradient = _flattened(flat, share)
    memory += flattened
    if settings.clip_norm:
        memory += clipped()
    memory += optimizers.memory(
        (flat.part_numel,), optimizer=settings, dtype=MASTER_DTYPE, device=training.device,
        owner="optimizer", first=first,
    )
    memory += gradient
    kernels = optimizers.kernels(
        (flat.part_numel,), optimizer=settings, dtype=MASTER_DTYPE, of=flat.dtype,
        device=training.device,
    )
    scaled = Kernel(
        "scale", flat.part_numel, 2 * flat.part_numel * MASTER_NBYTES, MASTER_DTYPE
    )
    return step.issue(
        "optimizer", ROOT, waits=(after,), kernels=(scaled, *kernels), memory=memory
    )


def _total(share: Share) -> Iterator[MemoryEvent]:
    """The root of the sum over ranks; -1 in its place if it is no number; the norm of all groups.
    """
    yield Alloc(norm_part("root"), "temporaries", NORM_NBYTES)
    yield Free(norm_part("reduced"))
    flags = [Alloc(norm_part(name), "temporaries", 1) for name in ("inf", "nan", "any")]
    error = Alloc(norm_part("error"), "temporaries", NORM_NBYTES)
    yield from (*flags, error)
    yield from (Free(alloc.buffer) for alloc in (*flags, error))
    yield from (Free(norm_part(index)) for index in range(len(share.pieces)))
    yield from combined(1, NORM_NBYTES)
    yield Free(norm_part("root"))


def _flattened(
    flat: FlatPartition, share: Share
) -> tuple[list[MemoryEvent], list[MemoryEvent]]:
    """The gradient of the part, and what is freed after the step. One gradient alone in its own
    dtype is no copy."""
    parts = len(share.pieces) + bool(share.padding)
    sources: list[MemoryEvent] = [
        *([Free(PADDING)] if share.padding else []), *([Free(KEPT)] if share.touched else [])
    ]
    if parts == 1 and flat.dtype == MASTER_DTYPE:
        return [], sources
    memory: list[MemoryEvent] = []
    if parts > 1 and flat.dtype != MASTER_DTYPE:
        memory.append(Alloc(Buffer("part.flat"), "temporaries", flat.part_numel * flat.element))
    memory.append(Alloc(GRADIENT, "temporaries", flat.part_numel * MASTER_NBYTES))
    if parts > 1 and flat.dtype != MASTER_DTYPE:
        memory.append(Free(Buffer("part.flat")))
    return [*memory, *sources], [Free(GRADIENT)]


def combined(count: int, nbytes: int) -> Iterator[MemoryEvent]:
    """The norm of all groups from those of `count` groups, of `nbytes` each; infinity in its place
    if one of them is no number."""
    groups, size, each, infinity = (
        Alloc(norm_part(name), "temporaries", numel * nbytes)
        for name, numel in (("groups", count), ("size", count), ("each", 1), ("infinity", 1))
    )
    equal, unequal, finite, others, below, either = (
        Alloc(norm_part(name), "temporaries", count)
        for name in ("equal", "unequal", "finite", "others", "below", "either")
    )
    invalid = Alloc(norm_part("invalid"), "temporaries", 1)
    yield from (groups, equal, size, unequal, finite)
    yield from (Free(each.buffer) for each in (equal, size, unequal))
    yield from (others, Free(finite.buffer), below, either, Free(others.buffer), Free(below.buffer))
    yield from (invalid, Free(either.buffer), each, infinity)
    yield Alloc(norm_part("all"), "temporaries", nbytes)
    yield from (Free(gone.buffer) for gone in (infinity, groups, invalid, each))


def clipped(nbytes: int = NORM_NBYTES) -> Iterator[MemoryEvent]:
    """The coefficient, of `nbytes`, by which the gradient is scaled in place."""
    names = ("unscaled", "sum", "ratio", "clip", "scale", "reciprocal", "coefficient")
    unscaled, total, ratio, clip, scale, reciprocal, coefficient = (
        Alloc(norm_part(name), "temporaries", nbytes) for name in names
    )
    yield from (unscaled, total, Free(unscaled.buffer), ratio, Free(total.buffer), clip)
    yield from (Free(ratio.buffer), scale, reciprocal, coefficient)
    yield from (Free(each.buffer) for each in (reciprocal, coefficient, scale, clip))
