"""Rank classes: ranks with the same rank program and the same layout of NCCL's communicators need
the same memory, so one rank represents each class.

A rank's non-torch memory depends on its program and on its positions in its nodes
(zsim.memory.non_torch). Nodes with equal positions in the mesh are examined once, so that 100,000
ranks take no longer than the few that differ.
"""

from __future__ import annotations

from zsim.cluster.cluster import ClusterSpec
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.memory.non_torch import communicators, ring


def rank_classes(program: Program, cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    """The lowest rank of each class, in ascending order, for each rank program."""
    first = {kind: program.assignment.index(kind) for kind in range(len(program.ranks))}
    if cluster.kind != "cuda":
        return tuple((rank,) for rank in first.values())
    groups = {
        kind: tuple(communicators(program.ranks[kind], program.mesh, rank=rank))
        for kind, rank in first.items()
    }
    classes: list[dict[tuple[object, ...], int]] = [{} for _ in program.ranks]
    for begin in _unlike_nodes(
        program, cluster, names=sorted({name for names in groups.values() for name in names})
    ):
        for rank in range(begin, min(begin + cluster.devices_per_node, program.mesh.world_size)):
            kind = program.assignment[rank]
            laid_out = tuple(ring(cluster, program.mesh, name, rank=rank) for name in groups[kind])
            classes[kind].setdefault(laid_out, rank)
    return tuple(tuple(sorted(ranks.values())) for ranks in classes)


def _unlike_nodes(program: Program, cluster: ClusterSpec, *, names: list[str]) -> list[int]:
    """The first rank of each node that differs from all nodes before it, in its ranks' programs or
    in its positions in the groups `names`."""
    size, mesh = cluster.devices_per_node, program.mesh
    strides = {name: _stride(mesh, name) for name in names}
    unlike: dict[tuple[object, ...], int] = {}
    for begin in range(0, mesh.world_size, size):
        where = tuple(
            _lies(begin, size, block=mesh.size(name) * stride, stride=stride)
            for name, stride in strides.items()
        )
        unlike.setdefault((program.assignment[begin : begin + size], where), begin)
    return list(unlike.values())


def _lies(begin: int, size: int, *, block: int, stride: int) -> tuple[int, ...]:
    """Position of a node of `size` ranks from `begin` in the groups of a name.

    A group's members are `stride` apart, within `block` ranks in a row.

    Inside a block it counts between which members the node begins, and where the block begins in
    its own first node.
    """
    inside = begin % block
    start = (begin - inside) % size
    return (inside % stride, start) if inside + size <= block else (inside, start, -1)


def _stride(mesh: Mesh, name: str) -> int:
    ranks = mesh.group(name, 0)
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1
