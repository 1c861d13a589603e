"""Clusters: rings are as wide as their links, and slow links hold up those that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from zsim.cluster.cluster import ClusterSpec, Layout, Path
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.links import SlowRail
from zsim.errors import ScenarioError
from zsim.ir.mesh import Mesh
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario


def test_a_dgx_h100_has_the_link_rates_that_nccl_reaches() -> None:
    cluster = load_cluster("dgx-h100", nodes=2)
    assert (cluster.num_ranks, cluster.devices_per_node, cluster.kind) == (16, 8, "cuda")
    assert cluster.path(tuple(range(8))) == Path(
        alpha_ns=3400, bytes_per_s=360 * 10**9, num_ranks=8, num_nodes=1, fullest=8
    )
    assert cluster.path(tuple(range(16))) == Path(
        alpha_ns=4725, bytes_per_s=360 * 10**9, num_ranks=16, num_nodes=2, fullest=8,
        network_bytes_per_s=384 * 10**9,
    )
    assert cluster.path((3, 11)) == Path(
        alpha_ns=14000, bytes_per_s=48 * 10**9, num_ranks=2, num_nodes=2, fullest=1,
        network_bytes_per_s=48 * 10**9,
    )


@pytest.mark.parametrize(("name", "bus_bandwidth"), [
    ("dgx-a100", 192), ("p4d", 48), ("p4de", 48), ("dgx-h100", 360), ("p5", 360),
    ("a100-40-roce", 192), ("dgx-b200", 384),
])
def test_a_ring_over_whole_nodes_is_as_wide_as_all_its_rails_or_the_fabric(
    name: str, bus_bandwidth: int
) -> None:
    cluster = load_cluster(name, nodes=4)
    assert cluster.path(tuple(range(32))).bytes_per_s == bus_bandwidth * 10**9


def test_a_ring_is_as_wide_as_the_node_with_the_fewest_of_its_members() -> None:
    """Two ranks on the first node and one on the second: one NIC carries what the ring sends there.
    """
    cluster = load_cluster("dgx-h100", nodes=2)
    one_nic = min(cluster.links.pcie.bandwidth, cluster.links.rail.bandwidth)
    assert cluster.path((6, 7, 8)).bytes_per_s == one_nic
    assert cluster.path((6, 7, 8, 9)).bytes_per_s == 2 * one_nic


def test_each_gpu_of_a_p5_has_four_nics_of_its_own() -> None:
    cluster = load_cluster("p5", nodes=2)
    assert [list(cluster.nics_of(rank)) for rank in (0, 7, 9)] == [
        [0, 1, 2, 3], [28, 29, 30, 31], [4, 5, 6, 7]
    ]
    assert cluster.path((3, 11)).bytes_per_s == 4 * 12 * 10**9


def test_two_gpus_of_a_p4d_share_a_nic_and_so_do_the_rings_of_like_groups() -> None:
    """HSDP's replicate axis: GPU 2 of each node; GPU 3's group uses the same NIC at the same time.
    """
    cluster = load_cluster("p4d", nodes=3)
    assert list(cluster.nics_of(2)) == list(cluster.nics_of(3)) == [1]
    assert cluster.path((2, 10, 18)).bytes_per_s == 6 * 10**9


def test_a_gpu_whose_neighbour_sends_nothing_has_their_nic_for_itself() -> None:
    """Two GPUs of a p4d share 12 GB/s. The ninth rank has no neighbour; in HSDP of threes the
    neighbour's group stays inside its node."""
    widths = [
        load_cluster("p4d", nodes=2, ranks=ranks).path(tuple(range(ranks))).bytes_per_s
        for ranks in (9, 10, 11, 16)
    ]
    assert widths == [12 * 10**9, 12 * 10**9, 24 * 10**9, 48 * 10**9]
    threes = load_cluster("p4d", nodes=2, ranks=12)
    assert threes.path((6, 7, 8)).bytes_per_s == 12 * 10**9
    assert threes.path((3, 9)).bytes_per_s == 6 * 10**9


def wide_nics(gb_s: int) -> ClusterSpec:
    """Two boxes of GPUs on PCIe with a NIC for each GPU."""
    box = load_cluster("pcie-box", nodes=2)
    nic = replace(box.links.rail, bandwidth=gb_s * 10**9)
    slot = replace(box.links.pcie, bandwidth=48 * 10**9)
    return replace(box, nics_per_node=8, links=replace(box.links, rail=nic, pcie=slot))


def test_without_nvlink_a_gpu_s_ring_and_its_nic_share_its_one_link() -> None:
    """A GPU's link carries 20 GB/s: half of it goes to a NIC of 10, all of it to one of 48. With
    NVLink a rank that is alone in its node needs none of it."""
    shares = [wide_nics(gb_s).usage((0, 8))[0]["fabric"] for gb_s in (10, 48)]
    assert shares == [Fraction(1, 2), 1]
    assert [wide_nics(gb_s).path((0, 8)).bytes_per_s for gb_s in (10, 48)] == [10**10, 2 * 10**10]
    assert "fabric" not in load_cluster("dgx-a100", nodes=2).usage((0, 8))[0]


def test_a_reduction_over_nics_takes_of_the_ring_in_the_node_where_they_share_a_link() -> None:
    """HSDP on boxes with a NIC of 12 GB/s. Shards in the node take all of 20 GB/s. Replicas need
    1.5 more, a GPU's part of the NIC."""
    box = load_cluster("pcie-box", nodes=2)
    shards, replicas = (box.usage(ranks)[0]["fabric"] for ranks in (tuple(range(8)), (0, 8)))
    assert (shards, replicas) == (1, Fraction(15, 200))


def by_counting(
    cluster: ClusterSpec, groups: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Fraction]:
    """Bytes/s of each group's ring, from the senders over each NIC when all of them run at once;
    groups inside a node send over none."""
    crossing = [group for group in groups if len({cluster.node_of(rank) for rank in group}) > 1]
    senders = Counter(
        (cluster.node_of(rank), nic) for group in crossing for rank in group
        for nic in cluster.nics_of(rank)
    )
    nic_rate = min(cluster.links.rail.bandwidth, cluster.links.pcie.bandwidth)
    widths = {}
    for group in crossing:
        nodes = Counter[int]()
        for rank in group:
            node = cluster.node_of(rank)
            nodes[node] += sum(
                (Fraction(nic_rate, senders[node, nic]) for nic in cluster.nics_of(rank)),
                Fraction(0),
            )
        needs_fabric = len(nodes) < len(group) or cluster.shares_pcie
        fabric = [cluster.links.fabric.bandwidth] if needs_fabric else []
        widths[group] = min(*nodes.values(), *fabric)
    return widths


@given(
    st.sampled_from(["p4d", "dgx-h100", "p5", "pcie-box"]), st.integers(1, 8), st.integers(1, 14),
    st.sampled_from(["dp_replicate", "dp_shard", "world", "dp_shard:2", "dp_replicate:2"]),
)
@example(
    "p4d", 9, 3, "dp_replicate:3"
)  # groups that begin alike in their nodes, and whose neighbours' groups do not
@example("pcie-box", 6, 5, "dp_replicate:2")
@example("pcie-box", 11, 3, "dp_shard")  # the last node has one rank, which has its NIC alone
@example("pcie-box", 6, 6, "dp_shard")
def test_a_ring_is_as_wide_as_its_part_of_the_nics_that_groups_of_its_axis_send_over(
    name: str, replicate: int, shard: int, axis: str
) -> None:
    mesh = Mesh(dp_replicate=replicate, dp_shard=shard)
    assume(not axis.endswith(":2") or getattr(mesh, axis.removesuffix(":2")) % 2 == 0)
    cluster = load_cluster(name, nodes=-(-mesh.world_size // 8), ranks=mesh.world_size)
    paths = {group: cluster.path(group) for group in mesh.groups(axis)}
    expected = by_counting(cluster, mesh.groups(axis))
    assert {group: path.bytes_per_s for group, path in paths.items() if path.num_nodes > 1} == {
        group: int(width) for group, width in expected.items()
    }
    like: dict[Layout, Path] = {}
    assert all(
        like.setdefault(cluster.layout(group), path) == path for group, path in paths.items()
    )


def test_a_slow_rail_holds_up_every_channel_of_the_rings_that_use_it_and_no_other() -> None:
    """12 of 24 GB/s on one of eight NICs: channels get equal parts, so the ring is as wide as eight
    slow ones."""
    slow = SlowRail(node=1, nic=3, bandwidth=12 * 10**9)
    cluster = replace(load_cluster("dgx-a100", nodes=4), slow_rails=(slow,))
    assert cluster.path(tuple(range(32))).bytes_per_s == 96 * 10**9
    assert cluster.path((3, 11)).bytes_per_s == 12 * 10**9
    assert cluster.path((4, 12)).bytes_per_s == cluster.path((19, 27)).bytes_per_s == 24 * 10**9


SLOW = """
model = { preset = "gpt-tiny" }
batch = { micro_batch = 1, sequence_length = 16 }
cluster = { preset = "p4d", nodes = 3 }
faults = [LINKS]
strategy = { name = "hsdp", dp_replicate = 3, dp_shard = 8 }
"""


def slowed(links: str) -> scenario.Scenario:
    kind = '{ kind = "slow_link",'
    return scenario.parse(SLOW.replace("LINKS", links.replace("{", kind)).encode(), where="s.toml")


def test_a_scenario_names_links_that_are_slower_and_its_step_is_slower_wherever_they_are() -> None:
    plain, slow = slowed(""), slowed('{ node = 1, nic = 3, bandwidth = "50 Gbit/s" }')
    assert slow.cluster.slow_rails == (SlowRail(node=1, nic=3, bandwidth=6_250_000_000),)
    other = slowed('{ node = 2, nic = 0, bandwidth = "50 Gbit/s" }')
    times = [
        SimBackend().run(case, options=RunOptions()).step_time_ns or 0
        for case in (plain, slow, other)
    ]
    assert times[0] < times[1] == times[2]
    everyone = SimBackend().run(slow, options=RunOptions(all_ranks=True))
    assert everyone.step_time_ns == times[1]


@pytest.mark.parametrize(("link", "message"), [
    ('{ node = 3, nic = 0, bandwidth = "1 Gbit/s" }',
     "faults[0].node: expected 0 to 2, found 3"),
    ('{ node = 0, nic = 4, bandwidth = "1 Gbit/s" }',
     "faults[0].nic: expected 0 to 3, found 4"),
    ('{ node = 0, nic = 0, bandwidth = "900 Gbit/s" }',
     "faults[0].bandwidth: expected 1 Mbit/s to "),
    ('{ node = 0, nic = 0, bandwidth = "1 B/s" }',
     "faults[0].bandwidth: expected 1 Mbit/s to "),
    ('{ node = 0, nic = 0, bandwidth = "1 bit/s" }',
     "faults[0].bandwidth: expected 1 Mbit/s to "),
    ('{ node = 0, nic = 0, bandwidth = "1 Mbit/s" }, { node = 0, nic = 1 }',
     "faults[1].bandwidth: expected a value"),
    ('{ node = 0, nic = 0, bandwith = "1 Gbit/s" }',
     "faults[0].bandwith: unknown key, did you mean bandwidth?"),
    ('{ node = -1, nic = 0, bandwidth = "1 Gbit/s" }',
     "faults[0].node: expected at least 0, found -1"),
    ('{ node = 0, nic = 0, bandwidth = "1 Gbit/s" }, 3',
     "faults[1]: expected a table, { key = value }, found 3"),
    ('{ node = 0, nic = 0, bandwidth = "fast" }', "faults[0].bandwidth: "),
    ('{ node = 0, nic = 0, bandwidth = "1 Gbit/s" }, { node = 0, nic = 0, bandwidth = "2 '
     'Gbit/s" }', "each link once"),
])
def test_links_that_a_cluster_does_not_have_are_refused_by_name(link: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        slowed(link)
    assert message in str(caught.value)


def narrow_nics(bandwidth: str) -> str:
    """The scenario's text with as narrow a link of every NIC."""
    return SLOW.replace("nodes = 3", f'nodes = 3, nic_bandwidth = "{bandwidth}"').replace(
        "LINKS", ""
    )


def test_narrower_links_of_all_nics_are_as_slow_links_all_over() -> None:
    narrow = '{ node = %d, nic = %d, bandwidth = "50 Gbit/s" }'
    everywhere = slowed(", ".join(narrow % (node, nic) for node in range(3) for nic in range(4)))
    whole = narrow_nics("50 Gbit/s")
    narrowed = scenario.parse(whole.encode(), where="narrow.toml")
    assert narrowed.cluster.links.rail.bandwidth == 6_250_000_000
    assert not narrowed.cluster.slow_rails
    times = [
        SimBackend().run(case, options=RunOptions()).step_time_ns for case in (narrowed, everywhere)
    ]
    assert times[0] == times[1] != SimBackend().run(slowed(""), options=RunOptions()).step_time_ns


@pytest.mark.parametrize("bandwidth", ["101 Gbit/s", "1 B/s", "fast", "-1 Gbit/s"])
def test_nics_are_no_faster_than_the_clusters_and_no_slower_than_a_network(bandwidth: str) -> None:
    whole = narrow_nics(bandwidth)
    with pytest.raises(ScenarioError, match=r"cluster\.nic_bandwidth: "):
        scenario.parse(whole.encode(), where="narrow.toml")


def test_a_tensor_parallel_group_across_two_nodes_has_the_rails_of_its_members() -> None:
    cluster = load_cluster("dgx-h100", nodes=2)
    assert cluster.path((4, 5, 6, 7, 8, 9, 10, 11)).bytes_per_s == 4 * 48 * 10**9
