"""Wrapping a model in DDP: shapes are verified, rank 0's parameters broadcast, the bucket of the first step made."""

from __future__ import annotations

from zsim.model import ROOT
from zsim.ops import Alloc, Free, MemoryEvent, MemoryKind, OpKind
from zsim.strategies.building import (
    MASTER_DTYPE,
    Step,
    named_parameters,
)
from zsim.strategies.replicated_model import AXIS, MASTER_NBYTES, USED, ReplicatedModel
from zsim.training import (
    DTYPE_NBYTES,
)

BROADCAST_CAP = 250 * (1 << 20)
"""torch coalesces the construction's broadcasts of parameters up to this many bytes."""


def construction(model: ReplicatedModel, *, has_master: bool) -> Step:
    """Build the model, check and broadcast its parameters, make the first bucket.

    A model that computes in two bytes is built in float32 and cast parameter by parameter; what was built is the master copy,
    or goes, as it does where a parameter is frozen.
    """
    step, element = Step(), DTYPE_NBYTES[model.dtype]
    units = model.training.model.units
    mastered = {parameter.fqn for parameter in model.reduced} if has_master else set[str]()
    if model.dtype != MASTER_DTYPE:
        kinds: dict[bool, MemoryKind] = {True: "optimizer_states", False: "parameters"}
        for unit in units:
            built = [Alloc(f"{p.fqn}:master", kinds[p.fqn in mastered], p.numel * MASTER_NBYTES) for p in unit.parameters]
            step.issue("alloc", unit.fqn, stream="host", memory=built)
    for unit in sorted(units, key=lambda unit: unit.fqn == ROOT):  # the order of named_parameters()
        memory: list[MemoryEvent] = []
        for parameter in unit.parameters:
            memory.append(Alloc(parameter.fqn, "parameters", parameter.numel * element))
            goes = model.dtype != MASTER_DTYPE and parameter.fqn not in mastered
            memory += [Free(f"{parameter.fqn}:master")] if goes else []
        step.issue("alloc", unit.fqn, stream="host", memory=memory)
    _check_shapes(step, model)
    _broadcast_parameters(step, model)
    memory = [Alloc("buckets", "communication", model.nbytes)]
    if model.finds_unused:  # the map is kept on the host, and sent from the device
        places = ("host", "device") if model.training.device == "cpu" else ("device",)
        memory += [Alloc(f"{USED}:{place}", "communication", model.used_nbytes) for place in places]
    step.issue("alloc", "buckets", stream="host", memory=memory)
    return step


def _check_shapes(step: Step, model: ReplicatedModel) -> None:
    """Every rank's number of parameters is gathered; rank 0's sizes and strides are broadcast and checked against a copy.

    All of these live until the check is over, also on one rank, which communicates nothing.
    """
    count, shapes = DTYPE_NBYTES["int64"], 2 * DTYPE_NBYTES["int64"] * sum(len(p.shape) for p in model.reduced)
    counts = (Alloc("shapes:count", "communication", count), Alloc("shapes:counts", "communication", count * model.num_replicas))
    sizes = (Alloc("shapes:sizes", "communication", shapes), Alloc("shapes:expected", "communication", shapes))
    collective_over_replicas(step, model, "all_gather", "shapes", counts[1].nbytes, dtype="int64", memory=counts)
    freed = tuple(Free(alloc.buffer) for alloc in (*sizes, *counts))
    collective_over_replicas(step, model, "broadcast", "shapes", shapes, dtype="int64", memory=(*sizes, *freed))


def _broadcast_parameters(step: Step, model: ReplicatedModel) -> None:
    element, nbytes = DTYPE_NBYTES[model.dtype], 0
    for parameter in named_parameters(model.training.model):
        nbytes += parameter.numel * element
        if nbytes >= BROADCAST_CAP:
            _transient(step, model, "broadcast", "parameters", nbytes, dtype=model.dtype)
            nbytes = 0
    if nbytes:
        _transient(step, model, "broadcast", "parameters", nbytes, dtype=model.dtype)


def _transient(step: Step, model: ReplicatedModel, kind: OpKind, unit: str, nbytes: int, *, dtype: str) -> None:
    """A collective over a buffer that lives only for it."""
    memory = (Alloc(f"{unit}:{kind}", "communication", nbytes), Free(f"{unit}:{kind}"))
    collective_over_replicas(step, model, kind, unit, nbytes, dtype=dtype, memory=memory)


def collective_over_replicas(
    step: Step, model: ReplicatedModel, kind: OpKind, unit: str, nbytes: int, *, dtype: str, memory: tuple[MemoryEvent, ...]
) -> None:
    """A collective over the replicas; on one rank its memory alone."""
    if model.num_replicas == 1:
        step.issue("alloc", unit, stream="host", memory=memory)
        return
    step.issue(kind, unit, group=AXIS, nbytes=nbytes, dtype=dtype, memory=memory)
