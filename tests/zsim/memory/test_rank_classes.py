"""The ranks that stand for all others hold outside torch's reserved bytes whatever any rank with
their Program holds."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.support.programs.small_programs import small_training
from zsim.cluster.cluster_presets import load_cluster
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Op
from zsim.ir.program import Program, RankProgram
from zsim.memory.non_torch import outside, total
from zsim.memory.rank_classes import rank_classes
from zsim.strategies import ddp, fsdp2, hsdp


def program(mesh: Mesh) -> Program:
    """DDP over replicas, FSDP2 over shards, HSDP over both."""
    if mesh.dp_shard == 1:
        return ddp.plan(small_training(), mesh=mesh, options=ddp.Options())
    if mesh.dp_replicate == 1:
        return fsdp2.plan(small_training(), mesh=mesh, options=fsdp2.Options())
    return hsdp.plan(small_training(), mesh=mesh, options=hsdp.Options())


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-h100"])
@pytest.mark.parametrize("mesh", [
    *(Mesh(dp_replicate=size) for size in (1, 2, 3, 8, 24)),
    *(Mesh(dp_shard=size) for size in (2, 8, 40)),
    *(
        Mesh(dp_replicate=other, dp_shard=size)
        for size, other in ((2, 4), (4, 10), (6, 12), (3, 16), (12, 6), (5, 16), (16, 5))
    ),
])
def test_what_any_rank_holds_is_held_by_one_that_stands_for_it(cluster: str, mesh: Mesh) -> None:
    nodes, rest = divmod(mesh.world_size, load_cluster(cluster).devices_per_node)
    spec = (
        load_cluster(cluster, ranks=mesh.world_size) if rest else load_cluster(cluster, nodes=nodes)
    )
    whole = program(mesh)
    for kind, ranks in enumerate(rank_classes(whole, spec)):
        everyone = {
            total(outside(whole, spec, rank=rank))
            for rank, its in enumerate(whole.assignment)
            if its == kind
        }
        assert {whole.assignment[rank] for rank in ranks} == {kind}
        assert {total(outside(whole, spec, rank=rank)) for rank in ranks} == everyone
        assert ranks[0] == whole.assignment.index(kind)


@pytest.mark.parametrize("size", [3, 5, 6, 12, 20])
def test_groups_of_neighbours_that_lie_across_nodes_are_not_taken_for_those_that_do_not(
    size: int
) -> None:
    op = Op(
        index=0, kind="all_reduce", unit="root", stream="all_reduce", group="dp_shard", nbytes=4
    )
    mesh = Mesh(dp_replicate=16, dp_shard=size)
    whole = Program(
        mesh=mesh, ranks=(RankProgram(construction=(), first=(op,), steady=(op,)),),
        assignment=(0,) * mesh.world_size,
    )
    spec = load_cluster("dgx-a100", nodes=2 * size)
    (ranks,) = rank_classes(whole, spec)
    everyone = {total(outside(whole, spec, rank=rank)) for rank in range(mesh.world_size)}
    assert {total(outside(whole, spec, rank=rank)) for rank in ranks} == everyone
    assert len(everyone) > 1


def test_ranks_that_are_assigned_another_program_in_the_middle_stand_for_themselves() -> None:
    whole = program(Mesh(dp_replicate=64))
    odd = replace(
        whole, ranks=(whole.ranks[0], whole.ranks[0]),
        assignment=tuple(int(rank == 27) for rank in range(64)),
    )
    assert rank_classes(odd, load_cluster("dgx-a100", nodes=8)) == (tuple(range(8)), (27,))


def test_on_a_cpu_all_ranks_with_one_program_are_alike() -> None:
    assert rank_classes(program(Mesh(dp_replicate=8)), load_cluster("cpu-gloo", ranks=8)) == ((0,),)


def test_of_100_000_ranks_the_few_that_differ_are_found_at_once() -> None:
    whole, spec = (
        program(Mesh(dp_replicate=12_500, dp_shard=8)), load_cluster("dgx-a100", nodes=12_500),
    )
    began = time.process_time()
    classes = rank_classes(whole, spec)
    assert time.process_time() - began < 1
    assert all(len(ranks) <= 8 for ranks in classes)
