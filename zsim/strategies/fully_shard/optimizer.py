"""The optimizer's step on fully_shard's shards: clipped by the norm of all of them, stepped where
they live, gradients dropped."""

from __future__ import annotations

from zsim.ir.buffers import gradient_of
from zsim.ir.ops import Free, HostEvent, MemoryEvent, Stream
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import clipping, host_step, optimizers
from zsim.strategies.building.training import Training
from zsim.strategies.fully_shard.fully_shard_step import FullyShardStep


def _clip(step: FullyShardStep, numels: list[int]) -> list[int]:
    """Clip this rank's shards by the norm of all: each gradient's norm is all-reduced over the
    shards. Returns what to wait for.

    Offloaded gradients are clipped by the host, which takes a process group that also has a backend
    for host memory.
    """
    count, sharded = len(numels), step.mesh.dp_shard > 1
    dtype = step.training.precision.stepped
    waits = step.reduces
    stream: Stream = "host" if step.elsewhere else "compute"
    norms = step.issue(
        "optimizer", clipping.NORMS, stream=stream, waits=waits,
        kernels=step.where_shards_are(clipping.norms_kernels(numels, dtype=dtype)),
        memory=()
        if step.elsewhere
        else clipping.norms_memory(count, dtype=dtype, sharded=sharded),
    )
    if sharded:
        norms = step.issue(
            "all_reduce",
            clipping.NORMS,
            stream="all_reduce",
            waits=(norms,),
            group="dp_shard",
            nbytes=count * DTYPE_NBYTES[dtype],
            dtype=dtype,
            memory=() if step.elsewhere else clipping.reduced_memory(count, dtype=dtype),
        )
    clipped = step.issue(
        "optimizer", clipping.CLIP, stream=stream, waits=(norms, *waits),
        kernels=step.where_shards_are(clipping.clip_kernels(numels, dtype=dtype)),
        memory=()
        if step.elsewhere
        else clipping.clip_memory(count, dtype=dtype, sharded=sharded),
    )
    return [clipped]


def memory_of(
    training: Training, numels: list[int]
) -> tuple[tuple[MemoryEvent, ...], tuple[MemoryEvent, ...]]:
    """Allocations and frees of the optimizer for parameters of `numels`, in the first step and in
    later ones."""
    return optimizers.first_and_later(
        numels, optimizer=training.optimizer, dtype=training.precision.stepped,
        device=training.device, owner="optimizer",
    )


def step_shards(
    step: FullyShardStep, numels: list[int], memory: tuple[MemoryEvent, ...]
) -> FullyShardStep:
    """The optimizer steps this rank's shards; its states are made in the first step. Then gradients
    are dropped."""
    settings = step.training.optimizer
    step.begin("optimizer")
    kernels = optimizers.kernels(
        numels, optimizer=settings, dtype=step.training.precision.stepped,
        device=step.training.device
    )
    host: tuple[HostEvent, ...] = ()
    if step.elsewhere:
        kernels = host_step.located(kernels, implementation=settings.implementation)
        memory, host = (), tuple(host_step.on_host(memory))
    waits = _clip(step, numels) if settings.clip_norm else step.reduces
    step.issue(
        "optimizer",
        ROOT,
        stream="host" if step.elsewhere else "compute",
        waits=waits,
        kernels=kernels,
        memory=memory,
        host=host,
    )
    step.begin("zero_grad")
    gradients = step.drop_each([gradient_of(unit.fqn) for unit in step.training.model.units])
    units = [unit.fqn for unit in step.training.model.units if unit.fqn in step.on_host]
    step.issue(
        "free", ROOT, stream="host", memory=gradients, host=[Free(gradient_of(u)) for u in units]
    )
    return step
