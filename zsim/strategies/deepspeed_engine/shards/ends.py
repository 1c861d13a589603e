"""The end of a step at stage 3.

It releases everything, takes a norm for each sub-group in float64, and steps sub-group by
sub-group. Then parameters that persist are gathered one by one. Source:
deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.ir.buffers import Buffer, infinities_part, norm_part, numbered, on_host
from zsim.ir.ops import Alloc, Free, HostAlloc, Kernel, MemoryEvent
from zsim.models.spec import ROOT, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import optimizers
from zsim.strategies.building.clipping import NORMS
from zsim.strategies.building.host_step import crossing, located
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.layout import AXIS, SCALED_DTYPE
from zsim.strategies.deepspeed_engine.offload.placement import in_host_memory, placed
from zsim.strategies.deepspeed_engine.optimizer import (
    GRADIENT,
    NORM_NBYTES,
    OVERFLOW,
    WIDE,
    WIDE_NBYTES,
    clipped,
    combined,
)
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES
from zsim.strategies.deepspeed_engine.searching import searching_kernels
from zsim.strategies.deepspeed_engine.shards.coordinator import Coordinator
from zsim.strategies.deepspeed_engine.shards.gathering import persistent_buffer, secondary_copy
from zsim.strategies.deepspeed_engine.shards.offload import offloaded_optimizer
from zsim.strategies.deepspeed_engine.shards.offload.offloaded_step import OffloadedShardedStep
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.deepspeed_engine.shards.step import ShardedStep


def optimizer_step(step: ShardedStep, coordinator: Coordinator, *, first: bool) -> None:
    """The end of a step of every rank."""
    sharded = step.sharded
    step.step.begin("optimizer")
    coordinator.release_all(sharded.every)
    if sharded.dtype == SCALED_DTYPE:
        _search_infinities(step.step, sharded)
    count, offloads = len(sharded.sub_groups), isinstance(step, OffloadedShardedStep)
    for number, group in enumerate(sharded.sub_groups):
        if isinstance(step, OffloadedShardedStep):
            offloaded_optimizer.norm(step, group, number=number)
        else:
            _norm(step.step, sharded, group, number=number)
    norm = norm_part("global" if first else "told")
    nbytes = NORM_NBYTES if offloads else WIDE_NBYTES
    memory: list[MemoryEvent] = [
        *combined(count, nbytes), Alloc(norm, "temporaries", nbytes),
    ]
    for number, group in enumerate(sharded.sub_groups):
        if isinstance(step, OffloadedShardedStep):
            step.swap_in(number, first=first)
            stepped = offloaded_optimizer.sub_step(step, group, memory, number=number, first=first)
            step.swap_out(number, after=stepped, first=first)
        else:
            after = _persistent(sharded) if number == count - 1 else []
            stepped = _sub_step(
                step.step, sharded, group, memory, after, number=number, first=first
            )
        memory = []
    if isinstance(step, OffloadedShardedStep):
        offloaded_optimizer.drop_norms(step, _persistent(sharded))
    _gather_persistent(step.step, sharded, after=stepped)
    coordinator.whole |= {parameter.fqn for parameter in sharded.persistent}
    if coordinator.secondary:
        _drop_copies(step.step, sharded)
        coordinator.secondary.difference_update(p.fqn for p in sharded.parameters)
    gone = [*(Free(norm_part("group", number)) for number in range(count)), Free(norm_part("all"))]
    gone += [] if first else [Free(norm_part("told"))]
    memory, host = placed(
        [*step.filled_again(sharded.persistent), *(in_host_memory(gone) if offloads else gone)],
        device=sharded.training.device,
    )
    step.step.issue("free", ROOT, stream="host", memory=memory, host=host)
    step.step.begin("zero_grad")


def _search_infinities(step: StepBuilder, sharded: ShardedParameters) -> None:
    """Search the gradients of all shards where they lie, and tell all ranks; the host reads."""
    offloads, numel = bool(sharded.training.offload.optimizer), sharded.rank_numel
    size, infinite, number, answer, copied = (
        Alloc(on_host(infinities_part(name), moved=offloads), "temporaries", nbytes)
        for name, nbytes in (
            ("size", numel * sharded.element), ("infinite", numel), ("number", numel), ("any", 1),
            ("copied", 1),
        )
    )
    sent = Alloc(infinities_part("sent"), "communication", 1)
    # on a CPU the meter does not see what is inside of torch's isinf
    inside = [size] if sharded.training.device != "cpu" else []
    memory, host = placed(
        [
            *inside, infinite, *(Free(each.buffer) for each in inside), answer,
            Free(infinite.buffer), Free(answer.buffer),
            number, answer, Free(number.buffer), Free(answer.buffer),
            copied, sent, Free(copied.buffer),
        ],
        device=sharded.training.device,
    )
    search = searching_kernels(numel, dtype=sharded.dtype)
    searched = step.issue(
        "optimizer", OVERFLOW, stream="host" if offloads else "compute", memory=memory, host=host,
        kernels=located(search) if offloads else search,
    )
    reduced = step.issue(
        "all_reduce", OVERFLOW, stream="all_reduce", waits=(searched,), group=AXIS, nbytes=1,
        dtype="uint8",
    )
    step.issue("host_wait", OVERFLOW, stream="host", waits=(reduced,), memory=[Free(sent.buffer)])


def _drop_copies(step: StepBuilder, sharded: ShardedParameters) -> None:
    """Copies in larger shards are of the last step, but for frozen parameters."""
    copies = [Free(secondary_copy(sharded, p).buffer) for p in sharded.parameters]
    memory, host = placed(copies, device=sharded.training.device)
    step.issue("free", ROOT, stream="host", memory=memory, host=host)


def _norm(
    step: StepBuilder, sharded: ShardedParameters, group: tuple[Parameter, ...], *, number: int
) -> None:
    """The norm of a sub-group's gradients, shard by shard in float64, then over ranks."""
    numels = [sharded.shard_numel(parameter) for parameter in group]
    memory: list[MemoryEvent] = []
    for index, numel in enumerate(numels):
        wide = Alloc(norm_part("wide"), "temporaries", WIDE_NBYTES * numel)
        memory += [wide, Alloc(norm_part(index), "temporaries", WIDE_NBYTES), Free(wide.buffer)]
    stack, squares = (
        Alloc(norm_part(name), "temporaries", WIDE_NBYTES * len(numels))
        for name in ("stack", "squares")
    )
    memory += [
        stack, squares, Free(stack.buffer), Alloc(norm_part("sum"), "communication", WIDE_NBYTES),
        Free(squares.buffer),
    ]
    total = sum(numels)
    normed = step.issue(
        "optimizer", NORMS,
        kernels=(
            copy_kernel(total, source=sharded.dtype, target=WIDE),
            Kernel("norm", 2 * total, WIDE_NBYTES * total, MASTER_DTYPE),
        ),
        memory=memory,
    )
    reduced = step.issue(
        "all_reduce", NORMS, stream="all_reduce", waits=(normed,), group=AXIS, nbytes=WIDE_NBYTES,
        dtype=WIDE,
    )
    flags = [Alloc(norm_part(name), "temporaries", 1) for name in ("inf", "nan", "any")]
    error = Alloc(norm_part("error"), "temporaries", DTYPE_NBYTES[MASTER_DTYPE])
    step.issue(
        "optimizer", NORMS, waits=(reduced,),
        memory=[
            Alloc(norm_part("root"), "temporaries", WIDE_NBYTES), *flags, error,
            Alloc(norm_part("group", number), "temporaries", WIDE_NBYTES), Free(norm_part("root")),
            Free(norm_part("sum")), *(Free(norm_part(index)) for index in range(len(numels))),
            *(Free(alloc.buffer) for alloc in (*flags, error)),
        ],
    )


def _sub_step(
    step: StepBuilder, sharded: ShardedParameters, group: tuple[Parameter, ...],
    before: Sequence[MemoryEvent], after: Sequence[MemoryEvent], *, number: int, first: bool,
) -> int:
    """Step one sub-group with its gradients in float32; with memory of what comes before and
    after."""
    training, size = sharded.training, sum(map(sharded.shard_numel, group))
    several, wide = len(group) > 1, sharded.dtype == MASTER_DTYPE
    memory = [*before]
    if several and not wide:
        memory.append(Alloc(Buffer("part.flat"), "temporaries", size * sharded.element))
    if several or not wide:
        memory.append(Alloc(GRADIENT, "temporaries", size * MASTER_NBYTES))
    if several and not wide:
        memory.append(Free(Buffer("part.flat")))
    if training.optimizer.clip_norm:
        memory += clipped(WIDE_NBYTES)
    memory += optimizers.memory(
        (size,), optimizer=training.optimizer, dtype=MASTER_DTYPE, device=training.device,
        owner=numbered("optimizer", number), first=first,
    )
    memory += [Free(GRADIENT)] if several or not wide else []
    kernels = optimizers.kernels(
        (size,), optimizer=training.optimizer, dtype=MASTER_DTYPE, of=sharded.dtype,
        device=training.device,
    )
    scale = Kernel("scale", size, 2 * size * MASTER_NBYTES, MASTER_DTYPE)
    if not training.offload.parameters:
        return step.issue("optimizer", ROOT, kernels=(scale, *kernels), memory=[*memory, *after])
    if not wide:
        kernels = kernels[:-1]
    stepped = step.issue("optimizer", ROOT, kernels=(scale, *kernels), memory=[*memory, *after])
    return _into_host(step, size, dtype=sharded.dtype, device=training.device, after=stepped)


def _into_host(step: StepBuilder, size: int, *, dtype: str, device: str, after: int) -> int:
    """The host waits for a stepped sub-group, in float32: it goes into pageable memory, is cast
    there and copied into offloaded shards. Float32 shards are page-locked, and take it as it is."""
    casts = dtype != MASTER_DTYPE
    wide = HostAlloc(on_host("stepped"), "temporaries", size * MASTER_NBYTES)
    cast = copy_kernel(size, source=MASTER_DTYPE, target=dtype)
    return step.issue(
        "copy", ROOT, stream="host", waits=(after,),
        kernels=(
            *crossing("to_host", size, dtype=MASTER_DTYPE, pinned=not casts),
            *located([cast] if casts else []),
        ),
        host=(wide, Free(wide.buffer)) if casts and device != "cpu" else (),
    )


def _persistent(sharded: ShardedParameters) -> list[Alloc]:
    """Memory of the parameters that stay whole from step to step."""
    return [
        Alloc(persistent_buffer(p.fqn), "parameters", sharded.padded_nbytes(p))
        for p in sharded.persistent
    ]


def _gather_persistent(step: StepBuilder, sharded: ShardedParameters, *, after: int) -> None:
    for parameter in sharded.persistent:
        step.issue(
            "all_gather", parameter.fqn, stream="all_gather", waits=(after,), group=AXIS,
            nbytes=sharded.padded_nbytes(parameter), dtype=sharded.dtype,
        )
