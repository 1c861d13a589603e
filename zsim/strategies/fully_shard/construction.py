"""Construction of fully_shard: whole parameters, cut group by group; host memory of a derived mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.parameters import children_first
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.building.training import Training
from zsim.strategies.fully_shard.param_group import FSDPParamGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedMesh:
    """Host memory of torch's DeviceMesh that is derived from another: 2-D, or for an int reshard.

    A map of int32 ranks lives on. To find its own coordinate a rank compares the map with itself (a
    byte per rank) and lists the match (an int64 for each of two axes). It does so for each
    parameter of a 2-D mesh, and for each group of an int reshard. Source:
    torch/distributed/device_mesh.py, get_coordinate.

    `resharded_to`: the ranks that an int reshard is over, 0 where there is none.
    """

    training: Training
    mesh: Mesh
    resharded_to: int

    @property
    def rank_map(self) -> list[MemoryEvent]:
        """The map, made with the first group."""
        needed = (self.mesh.dp_replicate > 1 or self.resharded_to) and self.training.device == "cpu"
        return [Alloc("mesh.rank_map", "communication", 4 * self.mesh.world_size)] if needed else []

    def lookup(self, *, of: Literal["group", "parameter"]) -> list[MemoryEvent]:
        """One search of this rank's coordinate."""
        needed = self.resharded_to if of == "group" else self.mesh.dp_replicate > 1
        if not needed or self.training.device != "cpu":
            return []
        compared = Alloc(
            "mesh.coordinate", "temporaries", self.mesh.world_size + 2 * DTYPE_NBYTES["int64"]
        )
        return [compared, Free(compared.buffer)]


def construction(
    groups: dict[str, FSDPParamGroup], order: list[str], *, derived: DerivedMesh, offloaded: bool
) -> StepBuilder:
    """Parameters are made whole, then every group in `order`, and the root's, is cut: its shards
    are made before its whole ones go.

    Offloaded shards leave the device as soon as each is cut. Where the optimizer steps two-byte
    parameters, the whole model is cast first, parameter by parameter.
    """
    training = derived.training
    step, element = StepBuilder(), DTYPE_NBYTES[training.precision.stepped]
    casts = training.precision.stepped != MASTER_DTYPE
    for group in groups.values():
        made = "exact" if casts else "whole"
        whole = [
            Alloc(f"{p.fqn}.{made}", "parameters", p.numel * DTYPE_NBYTES[MASTER_DTYPE])
            for p in group.parameters
        ]
        step.issue("alloc", group.fqn, stream="host", memory=whole)
    owner = {p.fqn: group.fqn for group in groups.values() for p in group.parameters}
    named = children_first(training.model.named_parameters) if casts else []
    for fqn, cast in groupby(named, key=lambda parameter: owner[parameter.fqn]):
        memory: list[MemoryEvent] = []
        for parameter in cast:
            name = parameter.fqn
            memory.append(Alloc(f"{name}.whole", "parameters", parameter.numel * element))
            memory.append(Free(f"{name}.exact"))
        step.issue("alloc", fqn, stream="host", memory=memory)
    if derived.rank_map:
        step.issue("alloc", ROOT, stream="host", memory=derived.rank_map)
    for group in [groups[fqn] for fqn in (*order, *([ROOT] if ROOT in groups else []))]:
        shards = derived.lookup(of="group")
        for p in group.parameters:
            shards += derived.lookup(of="parameter")
            shards += [Alloc(f"{p.fqn}.shard", "parameters", p.shard * element)] if p.shard else []
            shards += [Free(f"{p.fqn}.shard")] if p.shard and offloaded else []
        frees = [Free(f"{p.fqn}.whole") for p in group.parameters]
        step.issue("alloc", group.fqn, stream="host", memory=(*shards, *frees))
    searched = derived.lookup(of="group")
    if searched and ROOT not in groups:  # a root that owns nothing derives its mesh all the same
        step.issue("alloc", ROOT, stream="host", memory=searched)
    return step
