"""Hops of rings: as wide as the path says, over links that are there, and a NIC's worth on each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.links import SlowRail
from zsim.cluster.ring_hops import hops
from zsim.cluster.routes import graph
from zsim.ir.mesh import Mesh


@settings(max_examples=80, deadline=None)
@given(
    preset=st.sampled_from(clusters()),
    replicate=st.integers(1, 5),
    shard=st.integers(1, 13),
    slow=st.booleans(),
    data=st.data(),
)
def test_the_narrowest_hop_is_as_wide_as_the_ring(preset, replicate, shard, slow, data):
    mesh = Mesh(dp_replicate=replicate, dp_shard=shard)
    cluster = load_cluster(preset, nodes=-(-mesh.world_size // 8), ranks=mesh.world_size)
    if slow:
        rail = SlowRail(node=0, nic=0, bandwidth=cluster.links.rail.bandwidth // 3)
        cluster = replace(cluster, slow_rails=(rail,))
    name = data.draw(st.sampled_from(["dp_shard", "dp_replicate", "world"]))
    whole = graph(cluster)
    for ranks in mesh.groups(name):
        if len(ranks) == 1:
            continue
        ring = hops(cluster, ranks)
        assert min(hop.bytes_per_s for hop in ring) == cluster.path(ranks).bytes_per_s
        assert [hop.source for hop in ring] == list(ranks)
        assert [hop.destination for hop in ring] == [*ranks[1:], ranks[0]]
        for hop in ring:
            assert all(whole.has_edge(*use.link) for use in hop.uses)
            assert all(0 < use.share <= 1 for use in hop.uses)
            assert max(use.share for use in hop.uses) <= 1


def test_all_nics_of_a_node_carry_an_equal_part_of_each_chunk():
    cluster = load_cluster("dgx-h100", nodes=2)
    crossing = hops(cluster, tuple(range(16)))[7]
    rails = {use.link: (use.part, use.share) for use in crossing.uses if "rail" in use.link[1]}
    assert rails == {
        (f"node0.nic{nic}", f"rail{nic}"): (Fraction(1, 8), Fraction(1)) for nic in range(8)
    }


def test_ranks_on_one_nic_have_their_part_of_it():
    cluster = load_cluster("a100-80-4hdr", nodes=2)
    mesh = Mesh(dp_replicate=2, dp_shard=8)
    taken = Counter[tuple[str, str]]()
    for ranks in mesh.groups("dp_replicate"):
        for hop in hops(cluster, ranks):
            taken.update({use.link: use.share for use in hop.uses if "rail" in use.link[1]})
    assert len(taken) == 8
    assert set(taken.values()) == {1}


@pytest.mark.parametrize("node", [0, 1])
def test_a_slow_link_narrows_the_hops_into_its_node_and_out_of_it(node):
    slow = SlowRail(node=node, nic=2, bandwidth=10**9)
    cluster = replace(load_cluster("dgx-a100", nodes=3), slow_rails=(slow,))
    ring = hops(cluster, tuple(range(24)))
    narrow = {hop.source for hop in ring if hop.bytes_per_s == 8 * 10**9}
    assert narrow == {(8 * node - 1) % 24, 8 * node + 7}
    assert {hop.narrowest for hop in ring if hop.source in narrow} == {"rail"}


@pytest.mark.parametrize(("devices", "nics"), [(8, 8), (8, 12), (4, 9), (7, 16), (8, 3), (5, 4)])
def test_the_nics_of_a_rank_are_those_behind_its_pcie_switch(devices, nics):
    """Every NIC is next to some device, also where they do not divide among devices evenly."""
    cluster = replace(
        load_cluster("dgx-h100", nodes=2),
        devices_per_node=devices,
        nics_per_node=nics,
        num_ranks=2 * devices,
    )
    whole = graph(cluster)
    for rank in range(devices):
        (switch,) = [name for name in whole[f"node0.gpu{rank}"] if "pcie" in name]
        near = {name for name in whole[switch] if "nic" in name}
        assert near == {f"node0.nic{nic}" for nic in cluster.nics_of(rank)}
    everyone = {nic for rank in range(devices) for nic in cluster.nics_of(rank)}
    assert everyone == set(range(nics))
