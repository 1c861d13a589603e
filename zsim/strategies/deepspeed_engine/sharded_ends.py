"""Construction and the end of a step at stage 3.

Each parameter is broadcast twice and sharded; shards lie in one buffer, with master copies beside
them, also of float32 parameters. The step releases everything, takes a norm for each sub-group in
float64, and steps sub-group by sub-group. Then parameters that persist are gathered one by one.
Source: deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.spec import ROOT, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import optimizers
from zsim.strategies.building.clipping import NORMS
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.construction import make_and_broadcast
from zsim.strategies.deepspeed_engine.coordinator import Coordinator
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.optimizer import WIDE, WIDE_NBYTES
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES
from zsim.strategies.deepspeed_engine.sharded import ShardedParameters
from zsim.strategies.deepspeed_engine.sharded_step import ShardedStep, persistent_buffer

SHARDS, GRADIENTS = Buffer.of("shards", "parameters"), Buffer.of("shards", "gradients")
GRADIENT = "master_gradient"


def construction(sharded: ShardedParameters) -> StepBuilder:
    """Make, broadcast and shard the model; make what stays."""
    step, element, training = StepBuilder(), sharded.element, sharded.training
    make_and_broadcast(step, training, num_ranks=sharded.num_ranks)
    for parameter in sharded.parameters:
        made = Alloc(
            Buffer.of(parameter.fqn, "shard"), "parameters",
            sharded.shard_numel(parameter) * element,
        )
        step.issue(
            "broadcast", parameter.fqn, stream="all_gather", group=AXIS,
            nbytes=parameter.numel * element, dtype=sharded.dtype,
            memory=(made, Free(parameter.fqn)),
        )
    step.issue("alloc", ROOT, stream="host", memory=_what_stays(sharded))
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


def _what_stays(sharded: ShardedParameters) -> list[MemoryEvent]:
    """Shards in one buffer, master copies of sub-groups, the bucket, gradients of shards."""
    numel, element = sharded.rank_numel, sharded.element
    sizes = [sum(map(sharded.shard_numel, group)) for group in sharded.sub_groups]
    flat = Alloc(SHARDS, "parameters", numel * element)
    apart = [Free(Buffer.of(parameter.fqn, "shard")) for parameter in sharded.parameters]
    # defragmented through host memory, which is the device's own on a CPU
    memory: list[MemoryEvent] = [Alloc("infinities", "temporaries", 1)]
    memory += [flat, *apart] if sharded.training.device == "cpu" else [*apart, flat]
    for number, size in enumerate(sizes):
        cast = Alloc("master.cast", "temporaries", size * MASTER_NBYTES)
        memory += [cast] if sharded.dtype != MASTER_DTYPE else []
        memory.append(Alloc(f"master.{number}", "optimizer_states", size * MASTER_NBYTES))
        memory += [Free(cast.buffer)] if sharded.dtype != MASTER_DTYPE else []
    largest = Alloc(GRADIENT, "temporaries", max(sizes) * MASTER_NBYTES)
    nbytes = sharded.options.reduce_bucket_size * sharded.reduced_element
    return [
        *memory, largest, Free(largest.buffer), Alloc("bucket", "communication", nbytes),
        Alloc(GRADIENTS, "gradients", numel * element),
    ]


def optimizer_step(step: ShardedStep, coordinator: Coordinator, *, first: bool) -> None:
    """The end of a step of every rank."""
    sharded = step.sharded
    step.step.begin("optimizer")
    coordinator.release_all(sharded.parameters)
    for number, group in enumerate(sharded.sub_groups):
        _norm(step.step, sharded, group, number=number)
    count = len(sharded.sub_groups)
    told = "norm.global" if first else "norm.told"
    memory: list[MemoryEvent] = [
        Alloc("norm.groups", "temporaries", WIDE_NBYTES * count),
        Alloc("norm.all", "temporaries", WIDE_NBYTES), Free("norm.groups"),
        Alloc(told, "temporaries", WIDE_NBYTES),
    ]
    for number, group in enumerate(sharded.sub_groups):
        after = _persistent(sharded) if number == count - 1 else []
        stepped = _sub_step(
            step.step, sharded, group, memory, after, number=number, first=first
        )
        memory = []
    _gather_persistent(step.step, sharded, after=stepped)
    coordinator.whole |= {parameter.fqn for parameter in sharded.persistent}
    gone = [Free(f"norm.group.{number}") for number in range(count)] + [Free("norm.all")]
    step.step.issue(
        "free", ROOT, stream="host", memory=gone if first else [*gone, Free("norm.told")]
    )
    step.step.begin("zero_grad")


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
        memory += _clipped()
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


def _clipped() -> Iterator[MemoryEvent]:
    names = ("unscaled", "sum", "ratio", "clip", "scale", "reciprocal", "coefficient")
    unscaled, total, ratio, clip, scale, reciprocal, coefficient = (
        Alloc(f"norm.{name}", "temporaries", WIDE_NBYTES) for name in names
    )
    yield from (unscaled, total, Free(unscaled.buffer), ratio, Free(total.buffer), clip)
    yield from (Free(ratio.buffer), scale, reciprocal, coefficient)
    yield from (Free(each.buffer) for each in (reciprocal, coefficient, scale, clip))


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
