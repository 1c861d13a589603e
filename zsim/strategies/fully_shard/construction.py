"""Construction of fully_shard: each group is made whole and cut, one after another; host memory of
a derived mesh."""

from __future__ import annotations

from typing import Literal, NamedTuple

from zsim.ir.buffers import Buffer, form_of
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, HostAlloc, MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.torch_versions import RESHARD_ALONE
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.building.training import Training
from zsim.strategies.fully_shard.param_group import FSDPParamGroup


class DerivedMesh(NamedTuple):
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
    def of_axes(self) -> bool:
        """A mesh is derived from one of two axes."""
        return self.mesh.dp_replicate > 1 and self.training.torch not in RESHARD_ALONE.versions

    @property
    def rank_map(self) -> list[MemoryEvent]:
        """The map, made with the first group."""
        needed = (self.of_axes or self.resharded_to) and self.training.device == "cpu"
        ranks = Alloc(Buffer("mesh.rank_map"), "communication", 4 * self.mesh.world_size)
        return [ranks] if needed else []

    def lookup(self, *, of: Literal["group", "parameter"]) -> list[MemoryEvent]:
        """One search of this rank's coordinate."""
        needed = self.resharded_to if of == "group" else self.of_axes
        if not needed or self.training.device != "cpu":
            return []
        compared = Alloc(
            Buffer("mesh.coordinate"), "temporaries",
            self.mesh.world_size + 2 * DTYPE_NBYTES["int64"],
        )
        return [compared, Free(compared.buffer)]


def construction(
    groups: dict[str, FSDPParamGroup], order: list[str], *, derived: DerivedMesh, offloaded: bool
) -> StepBuilder:
    """The model is on the meta device, or made whole first. Every group in `order`, and the root's,
    is made whole and cut: its shards are made before its whole parameters go.

    Offloaded shards leave the device as soon as each is cut. Where the optimizer steps two-byte
    parameters, they are made in two bytes, or cast group by group.
    """
    step, element = StepBuilder(), DTYPE_NBYTES[derived.training.precision.stepped]
    once, made_whole = derived.rank_map, derived.training.model.made_whole
    casts = made_whole and derived.training.precision.stepped != MASTER_DTYPE
    for group in groups.values() if made_whole else ():
        exact = [
            Alloc(form_of(p.fqn, "exact" if casts else "whole"), "parameters",
                  p.numel * DTYPE_NBYTES[MASTER_DTYPE])
            for p in group.parameters
        ]
        step.issue("alloc", group.fqn, stream="host", memory=exact)
    for group in [groups[fqn] for fqn in (*order, *([ROOT] if ROOT in groups else []))]:
        whole: list[MemoryEvent] = []
        frees = [Free(form_of(p.fqn, "whole")) for p in group.parameters]
        for p, free in zip(group.parameters, frees, strict=True) if casts or not made_whole else ():
            whole.append(Alloc(free.buffer, "parameters", p.numel * element))
            whole += [Free(form_of(p.fqn, "exact"))] if casts else []
        if whole:
            step.issue("alloc", group.fqn, stream="host", memory=whole)
        shards, once = [*once, *derived.lookup(of="group")], []
        for p in group.parameters:
            shards += derived.lookup(of="parameter")
            if p.shard:
                shard = Alloc(form_of(p.fqn, "shard"), "parameters", p.shard * element)
                shards += [shard, Free(shard.buffer)] if offloaded else [shard]
        on_host = [
            HostAlloc(form_of(p.fqn, "shard"), "parameters", p.shard * element, pinned=True)
            for p in group.parameters if p.shard and offloaded
        ]
        step.issue("alloc", group.fqn, stream="host", memory=(*shards, *frees), host=on_host)
    searched = derived.lookup(of="group")
    if searched and ROOT not in groups:  # a root that owns nothing derives its mesh all the same
        step.issue("alloc", ROOT, stream="host", memory=searched)
    return step
