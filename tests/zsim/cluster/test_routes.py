"""Routes on the graph of a cluster: as long and as wide as the engine's rings, in closed form."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import networkx
import pytest

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.links import SlowRail
from zsim.cluster.routes import Route, graph, routes
from zsim.ir.mesh import Mesh

MESH = Mesh(dp_replicate=3, dp_shard=8)
GROUPS = ("dp_shard", "dp_replicate", "world", "dp_shard:2")


def cluster_of(name: str) -> ClusterSpec:
    """Three nodes of the preset, with eight devices each."""
    return load_cluster(name, nodes=3, ranks=24)


@pytest.mark.parametrize("name", clusters())
def test_hops_take_as_long_as_those_of_the_rings_and_are_no_wider_than_their_links(
    name: str,
) -> None:
    cluster = cluster_of(name)
    links, nic = cluster.links, min(cluster.links.pcie.bandwidth, cluster.links.rail.bandwidth)
    inside, between = ((links.fabric.bandwidth, cluster.hop_ns[0]), (nic, cluster.hop_ns[1]))
    expected = {"dp_replicate": [between], "world": [inside, between]}
    for ways in routes(cluster, MESH, GROUPS):
        ring = cluster.path(MESH.group(ways.group, 0))
        hops = [(hop.bytes_per_s, hop.latency_ns) for hop in ways.hops]
        assert hops == expected.get(ways.group, [inside])
        assert ways.ring_bytes_per_s == ring.bytes_per_s
        assert ways.num_ranks == ring.num_ranks
        assert hops[0][1] <= ring.alpha_ns <= hops[-1][1]


def test_a_ring_takes_nvlink_in_a_node_and_stays_on_its_rail_between_nodes() -> None:
    (whole,) = routes(cluster_of("p4d"), MESH, ("world",))
    assert whole.hops == (
        Route(
            parts=("node0.gpu0", "node0.switch", "node0.gpu1"), narrowest="fabric",
            bytes_per_s=240 * 10**9, latency_ns=3400,
        ),
        Route(
            parts=("node0.gpu0", "node0.pcie0", "node0.nic0", "rail0", "node1.nic0", "node1.pcie0",
                   "node1.gpu0"),
            narrowest="rail", bytes_per_s=12 * 10**9, latency_ns=14_000,
        ),
    )


def test_without_nvlink_both_ways_begin_on_the_gpu_s_one_link() -> None:
    (whole,) = routes(cluster_of("pcie-box"), MESH, ("world",))
    assert [hop.parts[:2] for hop in whole.hops] == [("node0.gpu0", "node0.pcie0")] * 2
    assert [hop.narrowest for hop in whole.hops] == ["fabric", "rail"]
    assert "node0.switch" not in graph(load_cluster("pcie-box"))


@pytest.mark.parametrize(("node", "nic"), [(0, 0), (1, 3), (2, 1)])
def test_the_narrowest_hop_is_over_the_slow_rail_wherever_it_is(node: int, nic: int) -> None:
    slow = SlowRail(node=node, nic=nic, bandwidth=5 * 10**9)
    cluster = replace(cluster_of("p4d"), slow_rails=(slow,))
    for ways in routes(cluster, MESH, ("dp_replicate", "world")):
        assert ways.hops[-1].bytes_per_s == 5 * 10**9
        assert {f"rail{nic}", f"node{node}.nic{nic}"} <= set(ways.hops[-1].parts)


def test_of_groups_that_lie_otherwise_the_slowest_is_shown() -> None:
    """Twelve ranks a group on nodes of eight: each group leaves its node, the second with four of
    its members in the first."""
    mesh = Mesh(dp_replicate=2, dp_shard=12)
    (ways,) = routes(cluster_of("dgx-h100"), mesh, ("dp_shard",))
    assert ways.ring_bytes_per_s == min(
        cluster_of("dgx-h100").path(ranks).bytes_per_s for ranks in mesh.groups("dp_shard")
    )
    assert [hop.narrowest for hop in ways.hops] == ["fabric", "rail"]


def test_a_route_needs_two_nodes_of_a_thousand_and_their_devices_alone() -> None:
    cluster = load_cluster("dgx-h100", nodes=1000)
    part = graph(cluster, devices=(0, 8))
    assert sum("gpu" in name for name in part) == 2
    assert {name.partition(".")[0] for name in part if "." in name} == {"node0", "node1"}
    (ways,) = routes(cluster, Mesh(dp_shard=8000), ("dp_shard",))
    assert [hop.narrowest for hop in ways.hops] == ["fabric", "rail"]


def test_the_rails_of_two_nodes_carry_what_a_ring_over_them_needs() -> None:
    whole = graph(load_cluster("dgx-a100", nodes=2))
    inside = [node for node in whole if node.startswith("node0")]
    crossing = networkx.edge_boundary(whole, inside)
    assert sum(whole.edges[edge]["bandwidth"] for edge in crossing) == 192 * 10**9


def test_the_graph_of_a_node_has_each_kind_of_part() -> None:
    whole = graph(load_cluster("p4d"))
    kinds = Counter(name.rpartition(".")[2].rstrip("0123456789") for name in whole)
    assert kinds == {"gpu": 8, "host": 1, "nic": 4, "pcie": 4, "rail": 4, "switch": 1}
    assert networkx.is_connected(whole)


@pytest.mark.parametrize(("name", "nodes"), [("dgx-h100", 128), ("p5", 2), ("pcie-box", 2)])
def test_all_gpus_form_one_connected_graph(name: str, nodes: int) -> None:
    whole = graph(load_cluster(name, nodes=nodes))
    assert sum("gpu" in part for part in whole) == 8 * nodes
    assert networkx.is_connected(whole)


def test_loading_a_cluster_does_not_import_networkx() -> None:
    code = (
        "import sys, zsim.cluster.cluster_presets as h; h.load_cluster('dgx-h100'); "
        "sys.exit('networkx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
