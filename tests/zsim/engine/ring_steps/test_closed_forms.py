"""A ring that has its links to itself takes as long by steps as by its closed form, to the ns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.folders import SCENARIOS
from tests.support.programs.collectives_at_once import alike, as_flows, as_steps, op
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.links import SlowRail
from zsim.engine.costs.op_costs import Costs
from zsim.engine.ring_steps.step_times import step_times
from zsim.engine.ring_steps.work import closed_forms
from zsim.engine.simulate import simulate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import OpKind
from zsim.scenario.plan import plan
from zsim.scenario.scenario import load

KINDS: tuple[OpKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@given(
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=40),
    total_ns=st.integers(1, 10**10),
    bytes_per_s=st.integers(1, 10**12),
)
def test_steps_share_the_whole_time_and_none_takes_less_than_nothing(sizes, total_ns, bytes_per_s):
    times = step_times(sizes, total_ns=total_ns, bytes_per_s=bytes_per_s)
    assert sum(each.latency_ns + each.pace_ns for each in times) == total_ns
    assert min(min(each) for each in times) >= 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", ["ring", "own"])
@pytest.mark.parametrize("preset", ["dgx-h100", "a100-80-roce", "p4d", "pcie-box", "cpu-gloo"])
def test_every_ring_of_2_to_64_ranks_takes_its_closed_form(preset, library, kind):
    for size in (2, 3, 8, 9, 16, 31, 64):
        cluster = load_cluster(preset, nodes=-(-size // 8), ranks=size)
        cluster = replace(cluster, collectives="ring") if library == "ring" else cluster
        costs, mesh = Costs(cluster), Mesh(dp_shard=size)
        for nbytes in (1, 50_000_017):
            program = alike(mesh, op(kind, nbytes, root=size // 2))
            flows, steps = as_flows(program, costs), as_steps(program, costs)
            assert steps.step_time_ns == flows.step_time_ns, (size, nbytes)


@settings(max_examples=60, deadline=None)
@given(
    preset=st.sampled_from(clusters()),
    kind=st.sampled_from(KINDS),
    size=st.integers(2, 64),
    nbytes=st.integers(1, 10**8),
    data=st.data(),
)
def test_so_does_any_ring_with_a_slow_link(preset, kind, size, nbytes, data):
    nodes = -(-size // 8)
    cluster = load_cluster(preset, nodes=nodes, ranks=size)
    slow = SlowRail(
        node=data.draw(st.integers(0, nodes - 1)),
        nic=data.draw(st.integers(0, cluster.nics_per_node - 1)),
        bandwidth=cluster.links.rail.bandwidth // data.draw(st.integers(2, 9)),
    )
    costs = Costs(replace(cluster, slow_rails=(slow,)))
    program = alike(Mesh(dp_shard=size), op(kind, nbytes, root=data.draw(st.integers(0, size - 1))))
    assert as_steps(program, costs).step_time_ns == as_flows(program, costs).step_time_ns


@pytest.mark.parametrize("nics", [1, 3, 4, 5, 9, 12, 24])
@pytest.mark.parametrize("group", ["dp_shard", "dp_replicate", "world"])
def test_so_do_rings_over_any_number_of_nics_for_each_node(nics, group):
    cluster = replace(load_cluster("dgx-h100", nodes=3), nics_per_node=nics)
    costs, mesh = Costs(cluster), Mesh(dp_replicate=3, dp_shard=8)
    program = alike(mesh, op("reduce_scatter", 10**7, group=group))
    assert as_steps(program, costs).step_time_ns == as_flows(program, costs).step_time_ns


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_all_ranks_of_full_nodes_end_at_once(kind, size):
    costs = Costs(load_cluster("dgx-a100", nodes=size // 8))
    program = alike(Mesh(dp_shard=size), op(kind, 10**7 + 1))
    flows, steps = as_flows(program, costs), as_steps(program, costs)
    assert {rank: (t.starts, t.ends) for rank, t in steps.ranks.items()} == {
        rank: (t.starts, t.ends) for rank, t in flows.ranks.items()
    }


FILES = [
    *sorted(SCENARIOS.glob("parity/*.toml"))[::4],
    SCENARIOS / "published" / "llama-3-8b-8-h100.toml",
    SCENARIOS / "published" / "hsdp-llama-3-8b-4x8-h100.toml",
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_whole_steps_of_equal_ranks_take_the_same_time_in_either_detail(file):
    """Each ring has its links to itself, and all its ranks come at once."""
    case = load(file)
    program, costs = plan(case, device=case.cluster.kind), Costs(case.cluster)
    flows = simulate(program, costs=costs, contention=False)
    steps = simulate(program, costs=costs, contention=False, stepwise=costs)
    assert steps.step_time_ns == flows.step_time_ns


@pytest.mark.parametrize(
    ("preset", "kind", "nodes", "nbytes", "expected"),
    [
        ("dgx-h100", "all_reduce", 1, 2**28, "all_reduce over dp_shard (nvls)"),
        ("dgx-h100", "all_reduce", 2, 2**28, "all_reduce over dp_shard (nvls_tree)"),
        ("cpu-gloo", "broadcast", 1, 2**20, "broadcast over dp_shard (tree)"),
        ("cpu-gloo", "all_to_all", 1, 2**20, "all_to_all over dp_shard (pairs)"),
        ("dgx-h100", "all_to_all", 2, 2**28, "all_to_all over dp_shard (pairs)"),
    ],
)
def test_what_is_no_ring_keeps_its_closed_form_and_is_told(preset, kind, nodes, nbytes, expected):
    costs = Costs(load_cluster(preset, nodes=nodes, ranks=8 * nodes))
    program = alike(Mesh(dp_shard=8 * nodes), op(kind, nbytes))
    flows, steps = as_flows(program, costs), as_steps(program, costs)
    assert closed_forms(program, costs) == (expected,)
    assert steps.hops == ()
    assert steps.step_time_ns == flows.step_time_ns


def test_one_node_a_rank_takes_what_nccl_would():
    """NCCL gathers small messages by PAT where each node has one GPU, and large ones on a ring."""
    costs = Costs(load_cluster("dgx-h100", nodes=16, ranks=128))
    mesh = Mesh(dp_replicate=16, dp_shard=8)
    told = [
        closed_forms(alike(mesh, op("all_gather", nbytes, group="dp_replicate")), costs)
        for nbytes in (2**10, 2**30)
    ]
    assert told == [("all_gather over dp_replicate (pat)",), ()]
