"""Norms and steps of sub-groups at stage 3 whose optimizer steps on the host.

The squares of the norms that were taken when shards were sent are summed, and all-reduced for each
sub-group in float32. The host has them from then on. What it has stepped it rounds, into offloaded
shards or into pageable memory on the way to the device. Source: deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.ir.buffers import buffer_of, norm_part, numbered, on_host
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.spec import ROOT, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.clipping import NORMS
from zsim.strategies.building.host_step import crossing, located
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.offload.placement import (
    STATES,
    Event,
    in_host_memory,
    placed,
    step_kernels,
    step_memory,
)
from zsim.strategies.deepspeed_engine.optimizer import clipped
from zsim.strategies.deepspeed_engine.shards.offload.offloaded_step import (
    DROPPED,
    SUMMED,
    TOLD,
    OffloadedShardedStep,
)

NORM_NBYTES = DTYPE_NBYTES[MASTER_DTYPE]


def norm(step: OffloadedShardedStep, group: tuple[Parameter, ...], *, number: int) -> None:
    """The norm of a sub-group's gradients over ranks."""
    builder = step.step
    summed = step.issue_placed("optimizer", NORMS, buffer_of(str(number), SUMMED))
    waited = builder.issue("host_wait", NORMS, stream="host", waits=(summed,))
    reduced = builder.issue(
        "all_reduce", NORMS, stream="all_reduce", waits=(waited,), group=AXIS, nbytes=NORM_NBYTES,
        dtype=MASTER_DTYPE,
    )
    flags = [Alloc(norm_part(name), "temporaries", 1) for name in ("inf", "nan", "any")]
    error = Alloc(norm_part("error"), "temporaries", NORM_NBYTES)
    copied = Alloc(on_host(norm_part("group", number)), "temporaries", NORM_NBYTES)
    moves = step.training.device != "cpu"
    root = replace(copied, buffer=norm_part("root")) if moves else copied
    builder.issue("alloc", NORMS, stream="host", memory=[root])
    step.norms_at = step.issue_placed(
        "optimizer", NORMS, buffer_of(str(number), TOLD), waits=(reduced,),
        memory=[
            *flags, error, *(Free(alloc.buffer) for alloc in (*flags, error)),
            Free(norm_part("sum")), *([copied, Free(root.buffer)] if moves else []),
        ],
    )


def sub_step(
    step: OffloadedShardedStep, group: tuple[Parameter, ...], before: Sequence[MemoryEvent], *,
    number: int, first: bool,
) -> int:
    """Step one sub-group on the host; with memory of what comes before."""
    sharded, training = step.sharded, step.training
    size = sum(map(sharded.shard_numel, group))
    numbers = [*before, *(clipped(NORM_NBYTES) if training.optimizer.clip_norm else ())]
    events: list[Event] = [*in_host_memory(numbers)]
    events += step_memory(training, size, owner=numbered(STATES, number), first=first)
    returns = not training.offload.parameters
    rounded = Alloc(on_host("rounded"), "temporaries", size * sharded.element)
    if returns and training.device != "cpu" and sharded.dtype != MASTER_DTYPE:
        events += [rounded, Free(rounded.buffer)]
    memory, host = placed(events, device=training.device)
    stepped = step.step.issue(
        "optimizer", ROOT, stream="host", waits=(step.norms_at,),
        kernels=(
            *step_kernels(training, size),
            *located([copy_kernel(size, source=MASTER_DTYPE, target=sharded.dtype)]),
        ),
        memory=memory, host=host,
    )
    return step.step.issue(
        "copy", ROOT, stream="host", waits=(stepped,),
        kernels=crossing("to_device", size, dtype=sharded.dtype, pinned=False) if returns else (),
    )


def drop_norms(step: OffloadedShardedStep, after: Sequence[MemoryEvent]) -> None:
    """The norms of shards go, once all are stepped; with memory of what comes `after`."""
    step.issue_placed(
        "optimizer", NORMS, buffer_of("", DROPPED), stream="host", waits=(step.norms_at,),
        memory=after,
    )
