"""Clipping and the optimizer's step over shards of flat parameters:
FullyShardedDataParallel.clip_grad_norm_, then torch.optim."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.buffers import gradient_of, norm_part
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import clipping, optimizers
from zsim.strategies.flat_parameter.flat_parameter_step import FlatParameterStep
from zsim.strategies.fsdp.passes import ORIGINAL


def optimizer(
    step: FlatParameterStep, numels: list[int], memory: tuple[MemoryEvent, ...], *, first: bool,
    keeps_gradients: bool,
) -> FlatParameterStep:
    """The optimizer steps this rank's shards; its states are made in the first step. Then gradients
    are dropped.

    `keeps_gradients`: the flat parameters still hold theirs, until the next forward.
    """
    settings = step.training.optimizer
    step.begin("optimizer")
    waits = clip(step, numels, first=first) if settings.clip_norm else []
    kernels = optimizers.kernels(
        numels, optimizer=settings, dtype=ORIGINAL, device=step.training.device
    )
    step.issue("optimizer", ROOT, waits=waits, kernels=kernels, memory=memory)
    step.begin("zero_grad")
    gradients = (
        [] if keeps_gradients else step.drop_each([gradient_of(unit) for unit in step.units])
    )
    step.issue("free", ROOT, stream="host", memory=gradients)
    return step


def clip(step: FlatParameterStep, numels: list[int], *, first: bool) -> list[int]:
    """Clip by the norm over all ranks: this rank's, squared, is all-reduced. Returns what to wait
    for."""
    norms = step.issue(
        "optimizer",
        clipping.NORMS,
        kernels=clipping.norms_kernels(numels, dtype=ORIGINAL),
        memory=_norms_memory(len(numels), first=first),
    )
    reduced = step.issue(
        "all_reduce",
        clipping.NORMS,
        stream="all_reduce",
        waits=(norms,),
        group="dp_shard",
        nbytes=DTYPE_NBYTES[ORIGINAL],
        dtype=ORIGINAL,
    )
    clipped = step.issue(
        "optimizer",
        clipping.CLIP,
        waits=(reduced,),
        kernels=clipping.clip_kernels(numels, dtype=ORIGINAL),
        memory=_clip_memory(held=bool(numels)),
    )
    return [clipped]


def _norms_memory(count: int, *, first: bool) -> Iterator[MemoryEvent]:
    """A zero for ranks without gradients, made once and kept; the norms, stacked, their norm, and
    its square, in this order."""
    element = DTYPE_NBYTES[ORIGINAL]
    if first:
        yield Alloc(norm_part("zero"), "temporaries", element)
    if count:
        yield from (Alloc(norm_part(i), "temporaries", element) for i in range(count))
        yield Alloc(norm_part("stack"), "temporaries", element * count)
        yield from (Free(norm_part(i)) for i in range(count))
        yield Alloc(norm_part("own"), "temporaries", element)
        yield Free(norm_part("stack"))
    yield Alloc(norm_part("square"), "temporaries", element)


def _clip_memory(*, held: bool) -> Iterator[MemoryEvent]:
    """The root of what was all-reduced, and the coefficient min(1, max_norm / (norm + ε)), by which
    gradients are scaled in place."""
    element = DTYPE_NBYTES[ORIGINAL]
    yield Alloc(norm_part("total"), "temporaries", element)
    yield Free(norm_part("square"))
    for name in ("sum", "reciprocal", "quotient"):
        yield Alloc(norm_part(name), "temporaries", element)
    yield Free(norm_part("reciprocal"))
    yield Free(norm_part("sum"))
    yield Alloc(norm_part("coefficient"), "temporaries", element)
    if held:
        yield Free(norm_part("own"))
    yield from (Free(norm_part(name)) for name in ("quotient", "coefficient", "total"))
