"""Construction at stages 1 and 2: rank 0's parameters for everyone, the flat buffer, the master
copy of a rank's part."""

from __future__ import annotations

from itertools import groupby

from zsim.ir.buffers import Buffer, buffer_of
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.parameters import children_first
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.building.training import Training
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.offload.partitioned import made
from zsim.strategies.deepspeed_engine.offload.placement import placed
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES, FlatPartition

FLAT, MASTER = buffer_of("flat", "parameters"), buffer_of("flat", "master")


def construction(flat: FlatPartition) -> StepBuilder:
    """Make the model, broadcast it, flatten what is trained, and copy this rank's part in float32.
    """
    step = StepBuilder()
    make_and_broadcast(step, flat.training, num_ranks=flat.num_ranks)
    step.issue("alloc", ROOT, stream="host", memory=_flattened(flat))
    if flat.training.offload.optimizer:
        made_memory, host = placed(made(flat), device=flat.training.device)
        step.issue("alloc", ROOT, stream="host", memory=made_memory, host=host)
        return step
    element = flat.element
    part = flat.part_numel
    cast = flat.dtype != MASTER_DTYPE
    copy = Alloc(Buffer("part"), "temporaries", part * element)
    memory: list[MemoryEvent] = [copy] if cast else []
    memory.append(Alloc(MASTER, "optimizer_states", part * MASTER_NBYTES))
    memory += [Free(copy.buffer)] if cast else []
    gradient = Alloc(Buffer("master_gradient"), "temporaries", part * MASTER_NBYTES)
    memory += [gradient, Free(gradient.buffer)]
    step.issue("alloc", ROOT, stream="host", memory=memory)
    return step


def _flattened(flat: FlatPartition) -> list[MemoryEvent]:
    """The flat buffer takes the place of what it is made of. One parameter alone without padding is
    its own."""
    padding = (flat.padded_numel - flat.numel) * flat.element
    if len(flat.parameters) + bool(padding) == 1:
        return []
    zeros = Alloc(Buffer("flat.padding"), "temporaries", padding)
    memory: list[MemoryEvent] = [zeros] if padding else []
    memory.append(Alloc(FLAT, "parameters", flat.padded_numel * flat.element))
    memory += [Free(zeros.buffer)] if padding else []
    return [*memory, *(Free(Buffer(parameter.fqn)) for parameter in flat.parameters)]


def make_and_broadcast(step: StepBuilder, training: Training, *, num_ranks: int) -> None:
    """Make the model in float32, cast it parameter by parameter where it computes in two bytes, and
    broadcast each."""
    dtype, units = training.precision.parameters, training.model.units
    element, casts = DTYPE_NBYTES[dtype], dtype != MASTER_DTYPE
    for unit in units:
        step.issue(
            "alloc", unit.fqn, stream="host",
            memory=[
                Alloc(
                    buffer_of(p.fqn, "made") if casts else Buffer(p.fqn), "parameters",
                    p.numel * MASTER_NBYTES,
                )
                for p in unit.parameters
            ],
        )
    named = training.model.named_parameters
    owner = {parameter.fqn: unit.fqn for unit in units for parameter in unit.parameters}
    if casts:
        for fqn, group in groupby(children_first(named), key=lambda p: owner[p.fqn]):
            memory: list[MemoryEvent] = []
            for p in group:
                memory.append(Alloc(Buffer(p.fqn), "parameters", p.numel * element))
                memory.append(Free(buffer_of(p.fqn, "made")))
            step.issue("alloc", fqn, stream="host", memory=memory)
    if num_ranks > 1:
        for p in named:
            step.issue(
                "broadcast", p.fqn, stream="all_gather", group=AXIS, nbytes=p.numel * element,
                dtype=dtype,
            )
