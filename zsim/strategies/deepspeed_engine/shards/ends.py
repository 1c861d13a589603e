"""Construction and the end of a step at stage 3.

Each parameter is broadcast twice and sharded; shards lie in one buffer, with master copies beside
them, also of float32 parameters. The step releases everything, takes a norm for each sub-group in
float64, and steps sub-group by sub-group. Then parameters that persist are gathered one by one.
Source: deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free, HostAlloc, Kernel, MemoryEvent
from zsim.models.spec import ROOT, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import optimizers
from zsim.strategies.building.clipping import NORMS
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.construction import make_and_broadcast
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.offload import sharded_optimizer
from zsim.strategies.deepspeed_engine.offload.placement import HOST, Event, placed
from zsim.strategies.deepspeed_engine.offload.sharded import OffloadedShardedStep
from zsim.strategies.deepspeed_engine.optimizer import (
    NORM_NBYTES,
    WIDE,
    WIDE_NBYTES,
    clipped,
    combined,
)
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES
from zsim.strategies.deepspeed_engine.shards.coordinator import Coordinator
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.deepspeed_engine.shards.step import (
    ShardedStep,
    persistent_buffer,
    secondary_copy,
)

GRADIENT = "master_gradient"


def construction(sharded: ShardedParameters) -> StepBuilder:
    """Make, broadcast and shard the model; make what stays."""
    step, training = StepBuilder(), sharded.training
    make_and_broadcast(step, training, num_ranks=sharded.num_ranks)
    for parameter in sharded.parameters:
        made = Alloc(
            _shard(sharded, parameter), "parameters",
            sharded.shard_numel(parameter) * sharded.element,
        )
        copies = [secondary_copy(sharded, parameter)] if sharded.spread > 1 else []
        memory, host = placed((*copies, made, Free(parameter.fqn)), device=training.device)
        step.issue(
            "broadcast", parameter.fqn, stream="all_gather", group=AXIS,
            nbytes=parameter.numel * sharded.element, dtype=sharded.dtype, memory=memory, host=host,
        )
    memory, host = placed(_what_stays(sharded), device=training.device)
    step.issue("alloc", ROOT, stream="host", memory=memory, host=host)
    for parameter in sharded.parameters:
        whole = Alloc(
            Buffer.of(parameter.fqn, "gathered"), "unsharded_parameters",
            sharded.padded_nbytes(parameter),
        )
        step.issue(
            "all_gather", parameter.fqn, stream="all_gather", group=AXIS, nbytes=whole.nbytes,
            dtype=sharded.dtype, memory=(whole, Free(whole.buffer)),
        )
    return step


def _shard(sharded: ShardedParameters, parameter: Parameter) -> str:
    """The buffer of a shard until all are in one."""
    prefix = HOST if sharded.training.offload.parameters else ""
    return Buffer.of(f"{prefix}{parameter.fqn}", "shard")


def _what_stays(sharded: ShardedParameters) -> Iterator[Event]:
    """Shards in one buffer, master copies of sub-groups, the bucket, gradients of shards. Where the
    host steps there are gradients of sub-groups too."""
    training, element, offload = sharded.training, sharded.element, sharded.training.offload
    prefix, pins = HOST if offload.optimizer else "", offload.pin_memory
    yield Alloc(f"{prefix}infinities", "temporaries", 1)
    yield from _in_one_buffer(sharded)
    sizes = [sum(map(sharded.shard_numel, group)) for group in sharded.sub_groups]
    moves = offload.optimizer and training.device != "cpu" and not offload.parameters
    for number, size in enumerate(sizes):
        cast = Alloc(f"{prefix}cast", "temporaries", size * MASTER_NBYTES)
        casts = moves or sharded.dtype != MASTER_DTYPE
        yield from [cast] if casts else []
        yield Alloc(f"{prefix}master.{number}", "optimizer_states", size * MASTER_NBYTES)
        yield from [Free(cast.buffer)] if casts else []
    largest = Alloc(f"{prefix}{GRADIENT}", "temporaries", max(sizes) * MASTER_NBYTES)
    yield largest
    for number, size in enumerate(sizes if offload.optimizer else ()):
        yield HostAlloc(f"{prefix}gradient.{number}", "gradients", size * MASTER_NBYTES, pins)
    yield Free(largest.buffer)
    yield Alloc(
        "bucket", "communication", sharded.options.reduce_bucket_size * sharded.reduced_element
    )
    numel = sharded.rank_numel * element
    stays = Buffer.of(f"{prefix}shards", "gradients")
    yield HostAlloc(stays, "gradients", numel, pins) if prefix else Alloc(stays, "gradients", numel)


def _in_one_buffer(sharded: ShardedParameters) -> Iterator[Event]:
    """Shards move into one buffer, through host memory. There it is first, and on a CPU it is the
    same."""
    nbytes = sharded.rank_numel * sharded.element
    apart: list[Event] = [Free(_shard(sharded, parameter)) for parameter in sharded.parameters]
    if sharded.training.offload.parameters:
        yield HostAlloc(Buffer.of(f"{HOST}shards", "parameters"), "parameters", nbytes, True)
        yield from apart
        return
    flat = Alloc(Buffer.of("shards", "parameters"), "parameters", nbytes)
    yield from [flat, *apart] if sharded.training.device == "cpu" else [*apart, flat]


def optimizer_step(step: ShardedStep, coordinator: Coordinator, *, first: bool) -> None:
    """The end of a step of every rank."""
    sharded = step.sharded
    step.step.begin("optimizer")
    coordinator.release_all(sharded.parameters)
    count, offloads = len(sharded.sub_groups), isinstance(step, OffloadedShardedStep)
    for number, group in enumerate(sharded.sub_groups):
        if isinstance(step, OffloadedShardedStep):
            sharded_optimizer.norm(step, group, number=number)
        else:
            _norm(step.step, sharded, group, number=number)
    told, nbytes = "norm.global" if first else "norm.told", NORM_NBYTES if offloads else WIDE_NBYTES
    memory: list[MemoryEvent] = [
        *combined(count, nbytes), Alloc(told, "temporaries", nbytes),
    ]
    for number, group in enumerate(sharded.sub_groups):
        if isinstance(step, OffloadedShardedStep):
            stepped = sharded_optimizer.sub_step(step, group, memory, number=number, first=first)
        else:
            after = _persistent(sharded) if number == count - 1 else []
            stepped = _sub_step(
                step.step, sharded, group, memory, after, number=number, first=first
            )
        memory = []
    if isinstance(step, OffloadedShardedStep):
        sharded_optimizer.drop_norms(step, _persistent(sharded))
    _gather_persistent(step.step, sharded, after=stepped)
    coordinator.whole |= {parameter.fqn for parameter in sharded.persistent}
    if coordinator.secondary:
        _drop_copies(step.step, sharded)
        coordinator.secondary.clear()
    gone = [Free(f"norm.group.{number}") for number in range(count)] + [Free("norm.all")]
    step.step.issue(
        "free", ROOT, stream="host", memory=gone if first else [*gone, Free("norm.told")]
    )
    step.step.begin("zero_grad")


def _drop_copies(step: StepBuilder, sharded: ShardedParameters) -> None:
    """Copies in larger shards are of the last step."""
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
        wide = Alloc("norm.wide", "temporaries", WIDE_NBYTES * numel)
        memory += [wide, Alloc(f"norm.{index}", "temporaries", WIDE_NBYTES), Free(wide.buffer)]
    size = WIDE_NBYTES * len(numels)
    memory += [
        Alloc("norm.stack", "temporaries", size), Alloc("norm.squares", "temporaries", size),
        Free("norm.stack"), Alloc("norm.sum", "communication", WIDE_NBYTES), Free("norm.squares"),
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
    flags = [Alloc(f"norm.{name}", "temporaries", 1) for name in ("inf", "nan", "any")]
    error = Alloc("norm.error", "temporaries", DTYPE_NBYTES[MASTER_DTYPE])
    step.issue(
        "optimizer", NORMS, waits=(reduced,),
        memory=[
            Alloc("norm.root", "temporaries", WIDE_NBYTES), *flags, error,
            Alloc(f"norm.group.{number}", "temporaries", WIDE_NBYTES), Free("norm.root"),
            Free("norm.sum"), *(Free(f"norm.{index}") for index in range(len(numels))),
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
        memory.append(Alloc("part.flat", "temporaries", size * sharded.element))
    if several or not wide:
        memory.append(Alloc(GRADIENT, "temporaries", size * MASTER_NBYTES))
    if several and not wide:
        memory.append(Free("part.flat"))
    if training.optimizer.clip_norm:
        memory += clipped(WIDE_NBYTES)
    memory += optimizers.memory(
        (size,), optimizer=training.optimizer, dtype=MASTER_DTYPE, device=training.device,
        owner=f"optimizer.{number}", first=first,
    )
    memory += [Free(GRADIENT)] if several or not wide else []
    kernels = optimizers.kernels(
        (size,), optimizer=training.optimizer, dtype=MASTER_DTYPE, of=sharded.dtype,
        device=training.device,
    )
    scale = Kernel("scale", size, 2 * size * MASTER_NBYTES, MASTER_DTYPE)
    return step.issue("optimizer", ROOT, kernels=(scale, *kernels), memory=[*memory, *after])


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
