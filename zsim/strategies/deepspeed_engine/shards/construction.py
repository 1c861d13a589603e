"""Construction at stage 3.

Each parameter is broadcast twice and sharded. Shards lie in one buffer, with master copies beside
them, also of float32 parameters. Source: deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zsim.ir.buffers import Buffer, buffer_of, numbered, on_host
from zsim.ir.ops import Alloc, Free, HostAlloc
from zsim.models.spec import ROOT, Parameter
from zsim.models.torch_versions import BARRIER_STAYS
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.construction import make_and_broadcast
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.offload.placement import Event, placed
from zsim.strategies.deepspeed_engine.optimizer import GRADIENT
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES
from zsim.strategies.deepspeed_engine.shards.drives import SWAP
from zsim.strategies.deepspeed_engine.shards.gathering import secondary_copy
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.deepspeed_engine.shards.quantized import HALF_NBYTES


def construction(sharded: ShardedParameters) -> StepBuilder:
    """Make, broadcast and shard the model; make what stays."""
    step, training = StepBuilder(), sharded.training
    make_and_broadcast(step, training, num_ranks=sharded.num_ranks)
    if sharded.parameter_buffer_nbytes[0]:
        memory, host = placed(_parameter_buffers(sharded), device=training.device)
        step.issue("alloc", ROOT, stream="host", memory=memory, host=host)
    for parameter in sharded.every:
        made = [] if sharded.begins_in_file(parameter) else [Alloc(
            _shard(sharded, parameter), "parameters",
            sharded.shard_numel(parameter) * sharded.element,
        )]
        copies = [secondary_copy(sharded, parameter)] if sharded.spread > 1 else []
        memory, host = placed((*copies, *made, Free(Buffer(parameter.fqn))), device=training.device)
        step.issue(
            "broadcast", parameter.fqn, stream="all_gather", group=AXIS,
            nbytes=parameter.numel * sharded.element, dtype=sharded.dtype, memory=memory, host=host,
        )
    memory, host = placed(_what_stays(sharded), device=training.device)
    step.issue("alloc", ROOT, stream="host", memory=memory, host=host)
    for parameter in sharded.parameters:
        whole = Alloc(
            buffer_of(parameter.fqn, "gathered"), "unsharded_parameters",
            sharded.padded_nbytes(parameter),
        )
        step.issue(
            "all_gather", parameter.fqn, stream="all_gather", group=AXIS, nbytes=whole.nbytes,
            dtype=sharded.dtype, memory=(whole, Free(whole.buffer)),
        )
    return step


def _shard(sharded: ShardedParameters, parameter: Parameter) -> Buffer:
    """The buffer of a shard until all are in one."""
    moved = bool(sharded.training.offload.parameters)
    return on_host(buffer_of(parameter.fqn, "shard"), moved=moved)


def _what_stays(sharded: ShardedParameters) -> Iterator[Event]:
    """Shards in one buffer, master copies of sub-groups, the bucket, gradients of shards. Where the
    host steps there are gradients of sub-groups too. What is on drives has page-locked buffers
    instead."""
    training, element, offload = sharded.training, sharded.element, sharded.training.offload
    name = partial(on_host, moved=bool(offload.optimizer))
    pins = offload.pin_memory
    yield Alloc(name("infinities"), "temporaries", 1)
    if training.torch in BARRIER_STAYS.versions:
        yield Alloc(Buffer("barrier"), "temporaries", 1)
    yield from _in_one_buffer(sharded)
    drives = sharded.drives
    if drives.pinned_nbytes:  # page-locked, of which CUDA knows nothing
        yield HostAlloc(on_host(SWAP), "temporaries", drives.pinned_nbytes, locked=True)
    in_memory = {
        number: size for number, size in enumerate(drives.sizes) if number not in drives.swapped
    }
    apart = bool(offload.optimizer) != bool(offload.parameters)  # shards and master copies
    moves = apart and training.device != "cpu"
    yield from _initialised(sharded)
    for number, size in in_memory.items():
        cast = Alloc(name("cast"), "temporaries", size * MASTER_NBYTES)
        casts = moves or sharded.dtype != MASTER_DTYPE
        yield from [cast] if casts else []
        yield Alloc(name(numbered("master", number)), "optimizer_states", size * MASTER_NBYTES)
        yield from [Free(cast.buffer)] if casts else []
    largest = Alloc(name(GRADIENT), "temporaries", max(drives.sizes) * MASTER_NBYTES)
    yield largest
    for number, size in in_memory.items() if offload.optimizer else ():
        yield HostAlloc(
            name(numbered("gradient", number)), "gradients", size * MASTER_NBYTES, pins
        )
    yield Free(largest.buffer)
    yield Alloc(
        Buffer("bucket"), "communication",
        sharded.options.reduce_bucket_size * sharded.reduced_element,
    )
    numel = sharded.rank_numel * element
    stays = name(buffer_of("shards", "gradients"))
    yield (
        HostAlloc(stays, "gradients", numel, pins) if offload.optimizer
        else Alloc(stays, "gradients", numel)
    )


def _in_one_buffer(sharded: ShardedParameters) -> Iterator[Event]:
    """Shards move into one buffer, through host memory. There it is first, and on a CPU it is the
    same."""
    offload, numel = sharded.training.offload, sharded.rank_numel
    nbytes = numel * sharded.element
    flat = buffer_of("shards", "parameters")
    apart: list[Event] = [
        Free(_shard(sharded, parameter))
        for group, stays in zip(sharded.sub_groups, sharded.stays, strict=True) if stays
        for parameter in group if not sharded.begins_in_file(parameter)
    ]
    if offload.parameters:
        if offload.parameters == "nvme":
            nbytes = max(1, min(numel, offload.max_in_cpu)) * sharded.element
        yield HostAlloc(on_host(flat), "parameters", nbytes, True)
        yield from apart
        if written := sharded.parameter_buffer_nbytes[1]:
            yield HostAlloc(
                on_host(buffer_of(SWAP, "written")), "temporaries", written, locked=True
            )
        return
    made = Alloc(flat, "parameters", nbytes)
    yield from [made, *apart] if sharded.training.device == "cpu" else [*apart, made]


def _parameter_buffers(sharded: ShardedParameters) -> Iterator[Event]:
    """Page-locked buffers that parameters come to from drives, and a number in place of what is in
    files."""
    read, _ = sharded.parameter_buffer_nbytes
    yield HostAlloc(on_host(buffer_of(SWAP, "read")), "temporaries", read, locked=True)
    yield HostAlloc(on_host(buffer_of(SWAP, "placeholder")), "temporaries", HALF_NBYTES)


def _initialised(sharded: ShardedParameters) -> Iterator[Event]:
    """Float32 copies in memory for a moment of sub-groups whose parameters are in files."""
    before: list[Event] = []
    for number, stays in enumerate(sharded.stays):
        if not stays and number in sharded.drives.swapped:
            nbytes = sharded.drives.sizes[number] * MASTER_NBYTES
            made = HostAlloc(on_host(numbered("wide", number)), "temporaries", nbytes)
            yield made
            yield from before
            before = [Free(made.buffer)]
    yield from before
