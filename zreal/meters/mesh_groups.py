"""The scenario's mesh in torch, and the names that c10d gives its process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zsim.ir.mesh import every, part_of
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """A process group of a mesh axis, or of a part of one.

    `ranks` are its global ranks in group order. They identify a group that is a part of the axis.
    """

    axis: str
    size: int
    ranks: tuple[int, ...] = ()
    is_part: bool = False

    @property
    def name(self) -> str:
        """The axis, or the mesh's name for a part of it: neighbours, or every n-th rank."""
        if not self.is_part:
            return self.axis
        step = self.ranks[1] - self.ranks[0]
        return part_of(self.axis, self.size) if step == 1 else every(self.axis, step)


def shard_groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """This rank's group along the last axis, which shards, and its group along another one before
    it, of replicas."""
    return mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if mesh.ndim > 1 else None


def device_mesh(scenario: Scenario, *, device: str) -> tuple[DeviceMesh, dict[str, MeshGroup]]:
    """The scenario's mesh in torch, and this rank's mesh groups by c10d group name.

    The mesh is 2-D where shards have replicas.
    """
    mesh = scenario.mesh
    axes = [
        (axis, size)
        for axis, size in (("dp_replicate", mesh.dp_replicate), ("dp_shard", mesh.dp_shard))
        if axis in STRATEGIES[scenario.strategy].axes
    ]
    axes = axes or [("dp_replicate", 1)]  # torch has no mesh without an axis
    if len(axes) > 1 and mesh.dp_replicate == 1:
        axes = axes[1:]  # torch would all-reduce over an axis of one replica as well
    torch_mesh = init_device_mesh(
        device, tuple(size for _, size in axes), mesh_dim_names=tuple(axis for axis, _ in axes)
    )
    groups = {}
    for axis, size in axes:
        group = torch_mesh.get_group(axis)
        ranks = tuple(dist.get_process_group_ranks(group))
        groups[str(group.group_name)] = MeshGroup(axis, size, ranks)
    return torch_mesh, groups
