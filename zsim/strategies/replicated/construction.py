"""Wrapping a model in DDP: shapes are verified, rank 0's parameters broadcast, the bucket of the
first step made.

Where DDP looks for unused parameters it rebuilds nothing, and makes all buckets here.
"""

from __future__ import annotations

from itertools import groupby

from zsim.ir.buffers import Buffer, buffer_of
from zsim.ir.ops import Alloc, Free, MemoryEvent, MemoryKind, OpKind
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.parameters import children_first
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.replicated.buckets import AXIS, MASTER_NBYTES, USED, ReplicatedModel

BROADCAST_CAP = 250 * (1 << 20)
"""torch coalesces broadcasts of parameters and buffers up to this many bytes."""
ONE_BUCKET = Buffer("buckets")
"""The storage of all gradients together, until buckets are rebuilt in the order in which gradients
were ready."""
IN_FLIGHT = 2
"""The most of such broadcasts at a time."""


def construction(model: ReplicatedModel, *, has_master: bool) -> StepBuilder:
    """Build the model, check and broadcast its parameters, make the first bucket."""
    step, element = parameters_made(model, has_master=has_master), DTYPE_NBYTES[model.dtype]
    _check_shapes(step, model)
    named = model.training.model.named_parameters
    parameters = [("parameters", model.dtype, parameter.numel * element) for parameter in named]
    _broadcast(step, model, [*parameters, *_buffers(model)])
    memory = (
        list(model.storages)
        if model.finds_unused
        else [Alloc(ONE_BUCKET, "communication", model.nbytes)]
    )
    if model.finds_unused:  # the map is kept on the host, and sent from the device
        places = ("host", "device") if model.training.device == "cpu" else ("device",)
        memory += [
            Alloc(buffer_of(USED, where), "communication", model.used_nbytes) for where in places
        ]
    step.issue("alloc", "buckets", stream="host", memory=memory)
    return step


def parameters_made(model: ReplicatedModel, *, has_master: bool) -> StepBuilder:
    """Build the model. One that computes in two bytes is built in float32 and cast parameter by
    parameter.

    The float32 parameters become master copies; those of frozen parameters are freed.
    """
    step, element = StepBuilder(), DTYPE_NBYTES[model.dtype]
    units = model.training.model.units
    mastered = {parameter.fqn for parameter in model.reduced} if has_master else set[str]()
    if model.dtype != MASTER_DTYPE:
        kinds: dict[bool, MemoryKind] = {True: "optimizer_states", False: "parameters"}
        for unit in units:
            built = [
                Alloc(buffer_of(p.fqn, "master"), kinds[p.fqn in mastered], p.numel * MASTER_NBYTES)
                for p in unit.parameters
            ]
            step.issue("alloc", unit.fqn, stream="host", memory=built)
    owner = {parameter.fqn: unit.fqn for unit in units for parameter in unit.parameters}
    named = model.training.model.named_parameters
    for unit_fqn, cast in groupby(
        children_first(named), key=lambda parameter: owner[parameter.fqn]
    ):
        memory: list[MemoryEvent] = []
        for parameter in cast:
            memory.append(Alloc(Buffer(parameter.fqn), "parameters", parameter.numel * element))
            goes = model.dtype != MASTER_DTYPE and parameter.fqn not in mastered
            memory += [Free(buffer_of(parameter.fqn, "master"))] if goes else []
        step.issue("alloc", unit_fqn, stream="host", memory=memory)
    return step


def _check_shapes(step: StepBuilder, model: ReplicatedModel) -> None:
    """Every rank's number of parameters is gathered; rank 0's sizes and strides are broadcast and
    checked against a copy.

    All of these live until the check is over, also on one rank, which communicates nothing.
    """
    count, shapes = (
        DTYPE_NBYTES["int64"], 2 * DTYPE_NBYTES["int64"] * sum(len(p.shape) for p in model.reduced),
    )
    counts = (
        Alloc(Buffer("shapes:count"), "communication", count),
        Alloc(Buffer("shapes:counts"), "communication", count * model.num_replicas),
    )
    sizes = (
        Alloc(Buffer("shapes:sizes"), "communication", shapes),
        Alloc(Buffer("shapes:expected"), "communication", shapes),
    )
    collective_over_replicas(
        step, model, "all_gather", "shapes", counts[1].nbytes, dtype="int64", memory=counts
    )
    freed = tuple(Free(alloc.buffer) for alloc in (*sizes, *counts))
    collective_over_replicas(
        step, model, "broadcast", "shapes", shapes, dtype="int64", memory=(*sizes, *freed)
    )


BUFFERS = "buffers"
"""The unit of broadcasts of the module's buffers."""
State = tuple[str, str, int]
"""A broadcast state: "parameters" or "buffers", its dtype and its bytes."""
BroadcastBatch = tuple[str, str, int, int]
"""States of one dtype that are broadcast together, and how many they are."""


def _buffers(model: ReplicatedModel) -> list[State]:
    return [(BUFFERS, dtype, nbytes) for dtype, nbytes in model.training.model.buffers]


def broadcast_buffers(step: StepBuilder, model: ReplicatedModel, *, micro_batch: int) -> None:
    """Rank 0's buffers for everyone, before a forward."""
    _broadcast(step, model, _buffers(model), micro_batch=micro_batch)


def _broadcast(
    step: StepBuilder, model: ReplicatedModel, states: list[State], *, micro_batch: int = 0
) -> None:
    """Rank 0's `states` in flat pieces of one dtype each, in the order of what they begin with; two
    are under way at a time.

    A piece of one tensor is that tensor, and no copy. torch/csrc/distributed/c10d/reducer.cpp
    (compute_bucket_assignment_by_size), comm.cpp (broadcast_coalesced) and
    torch/csrc/utils/tensor_flatten.h (flatten_dense_tensors).
    """
    pieces = _coalesced(states)
    flat = [
        buffer_of(unit, "broadcast", number or None) if count > 1 else None
        for number, (unit, _, _, count) in enumerate(pieces)
    ]
    for number, (unit, dtype, nbytes, _) in enumerate(pieces):
        over = [flat[number - IN_FLIGHT]] if number >= IN_FLIGHT else []
        own = flat[number]
        made = [Alloc(own, "communication", nbytes)] if own else []
        last = flat[max(0, number + 1 - IN_FLIGHT) :] if number == len(pieces) - 1 else []
        memory: tuple[MemoryEvent, ...] = (
            *(Free(name) for name in over if name), *made, *(Free(name) for name in last if name),
        )
        collective_over_replicas(
            step, model, "broadcast", unit, nbytes, dtype=dtype, memory=memory,
            micro_batch=micro_batch,
        )


def _coalesced(states: list[State]) -> list[BroadcastBatch]:
    """`states` joined up to the cap, each dtype by itself."""
    broadcasts: list[tuple[int, BroadcastBatch]] = []
    filling: dict[str, tuple[int, BroadcastBatch]] = {}
    for number, (unit, dtype, nbytes) in enumerate(states):
        first, (name, _, size, count) = filling.pop(dtype, (number, (unit, dtype, 0, 0)))
        joined = (first, (name, dtype, size + nbytes, count + 1))
        if size + nbytes >= BROADCAST_CAP:
            broadcasts.append(joined)
        else:
            filling[dtype] = joined
    return [state for _, state in sorted([*broadcasts, *filling.values()])]


def collective_over_replicas(
    step: StepBuilder, model: ReplicatedModel, kind: OpKind, unit: str, nbytes: int, *, dtype: str,
    memory: tuple[MemoryEvent, ...], micro_batch: int = 0,
) -> None:
    """A collective over the replicas; on one rank its memory alone."""
    if model.num_replicas == 1:
        step.issue("alloc", unit, stream="host", micro_batch=micro_batch, memory=memory)
        return
    step.issue(
        kind, unit, group=AXIS, nbytes=nbytes, dtype=dtype, micro_batch=micro_batch, memory=memory
    )
