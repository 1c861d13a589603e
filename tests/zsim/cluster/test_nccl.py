"""NCCL's durations: sums by hand, physics that no sum may break, and what is not known said to be
assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.collectives import LIBRARIES
from zsim.cluster.collectives.nccl.bands import BETWEEN, MEASURED
from zsim.cluster.collectives.nccl.channel_search import RINGS_IN_NODE
from zsim.cluster.collectives.nccl.estimate import Communicator, estimate, time_ns
from zsim.cluster.collectives.nccl.placed import communicator, estimated
from zsim.cluster.collectives.nccl.tuner import GENERATIONS, Algorithm
from zsim.cluster.links import Fabric, Generation
from zsim.errors import ZsimError

KIB, MIB, GIB = 2**10, 2**20, 2**30


def node(generation: Generation, num_ranks: int) -> Communicator:
    channels, rate = RINGS_IN_NODE[generation]
    return Communicator(
        generation=generation, num_ranks=num_ranks, num_nodes=1, bus_gb_s=channels * rate
    )


def network(
    generation: Generation, num_ranks: int, num_nodes: int, bus_gb_s: float, fabric: Fabric = "ib"
) -> Communicator:
    return Communicator(
        generation=generation, num_ranks=num_ranks, num_nodes=num_nodes, bus_gb_s=bus_gb_s,
        fabric=fabric,
    )


H100 = Communicator(generation="hopper", num_ranks=8, num_nodes=1, bus_gb_s=360)
BUS = {"volta": 120.0, "ampere": 240.0, "hopper": 360.0, "blackwell": 720.0}
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
CUDA = [name for name in clusters() if load_cluster(name).kind == "cuda"]


@st.composite
def communicators(draw: st.DrawFn) -> Communicator:
    generation = draw(st.sampled_from(GENERATIONS))
    nodes = draw(st.sampled_from([1, 1, 2, 3, 8, 64]))
    per_node = draw(st.integers(1 if nodes > 1 else 2, 8))
    return Communicator(
        generation=generation, num_ranks=nodes * per_node, num_nodes=nodes,
        bus_gb_s=draw(st.sampled_from([6.0, 48.0, 192.0])) if nodes > 1 else BUS[generation],
        fabric=draw(st.sampled_from(["ib", "roce", "efa", "tcp", "unknown"])),
        links=draw(st.sampled_from(["nvlink", "nvlink", "pcie"])),
    )


def test_an_all_reduce_of_a_gigabyte_on_eight_h100_is_the_switch_s_sum_by_hand() -> None:
    """A launch of 11 and NCCL's 25 µs, 2^30 B at 8 × 40 · 0.85 = 272 GB/s. Two of its three stages
    are without work for a round at an end, of 128 KiB of each rank in 16 channels."""
    nvls = estimate("all_reduce", GIB, H100)
    assert (nvls.algorithm, nvls.protocol) == ("nvls", "Simple")
    rounds = 2 * 16 * 8 * 128 * KIB / 272e3
    assert nvls.microseconds == pytest.approx(36 + GIB / 272e3 + rounds)


def test_a_ring_between_two_nodes_has_a_hop_of_the_network_and_its_nic_by_hand() -> None:
    """Launch and base, 14 hops of NVLink and one of 14 + 75 µs. 15/16 of 256 MiB at 360 GB/s.
    The time of a chunk of 1 MiB in 16 channels."""
    two = network("hopper", 16, 2, 360, "efa")
    predicted = estimate("all_gather", 256 * MIB, two)
    start = 11 + 8.4 + 14 * 3.4 + 14 + 75
    assert (predicted.algorithm, predicted.protocol) == ("ring", "Simple")
    assert predicted.microseconds == pytest.approx(start + (240 + 16) * MIB / 360e3)


def test_a_ring_of_many_rounds_loses_a_fifth_of_a_chunk_in_each_but_its_first() -> None:
    """A GiB of two A100: 512 MiB of each rank are 10 2/3 rounds of 24 channels with 2 MiB."""
    predicted = estimate("all_reduce", GIB, node("ampere", 2))
    lost = (1 + 0.2 * (32 / 3 - 1)) * 48 * MIB / 240e3
    assert predicted.microseconds == pytest.approx(29 + 8.4 + 2 * 3.4 + GIB / 240e3 + lost)


def test_a_broadcasts_first_chunk_goes_down_the_whole_line_by_hand() -> None:
    """The tuner's hops of an all-gather, a GiB, and six hops of 24 channels with 512 KiB at 1.03 ·
    360 GB/s."""
    predicted = estimate("broadcast", GIB, H100)
    moved = GIB + 6 * 24 * 512 * KIB
    assert predicted.microseconds == pytest.approx(11 + 8.4 + 7 * 3.4 + moved / (1.03 * 360e3))


def test_a_tree_of_eight_nodes_has_three_levels_each_way_by_hand() -> None:
    """A100 with 8 HDR: a chain of 7 hops and 3 levels both ways, 256 MiB. Half of 8 channels of
    17.8 GB/s is less than half of 0.92 · 192."""
    forced = replace(network("ampere", 64, 8, 192), algorithm="tree")
    predicted = estimate("all_reduce", 256 * MIB, forced)
    assert predicted.microseconds == pytest.approx(
        29 + 8.4 + 2 * (7 * 4.0 + 3 * 14.0) + 256 * MIB / (0.5 * 8 * 17.8 * 1000)
    )


def test_ampere_between_nodes_reduces_small_messages_by_trees_and_large_ones_on_rings() -> None:
    sixteen = network("ampere", 128, 16, 192)
    chosen = [estimate("all_reduce", size, sixteen).algorithm for size in (KIB, MIB, 4 * GIB)]
    assert chosen == ["tree", "tree", "ring"]
    tree, ring = (
        estimate("all_reduce", MIB, replace(sixteen, algorithm=each)).microseconds
        for each in ("tree", "ring")
    )
    assert tree < ring / 2


def test_efa_of_a100_has_no_protocol_of_low_latency() -> None:
    """p4d's plugin allows Simple alone, so that 8 bytes have its latency."""
    p4d = network("ampere", 16, 2, 48, "efa")
    assert estimate("all_reduce", 8, p4d).protocol == "Simple"
    assert estimate("all_reduce", 8, replace(p4d, fabric="ib")).protocol == "LL"


@given(
    asked=communicators(), op=st.sampled_from(OPS), nbytes=st.integers(0, 2**35),
    more=st.integers(0, 2**35),
)
def test_more_bytes_never_take_less_time(
    asked: Communicator, op: str, nbytes: int, more: int
) -> None:
    assert time_ns(op, nbytes, asked) <= time_ns(op, nbytes + more, asked)


@given(asked=communicators(), op=st.sampled_from(OPS), nbytes=st.integers(KIB, 2**35))
def test_twice_the_bytes_take_no_more_than_three_times_as_long(
    asked: Communicator, op: str, nbytes: int
) -> None:
    """No other algorithm or protocol begins with a leap."""
    assert time_ns(op, 2 * nbytes, asked) <= 3 * time_ns(op, nbytes, asked)


@given(asked=communicators(), op=st.sampled_from(OPS), nbytes=st.integers(0, 2**35))
def test_more_bandwidth_never_takes_more_time(asked: Communicator, op: str, nbytes: int) -> None:
    assert time_ns(op, nbytes, replace(asked, bus_gb_s=2 * asked.bus_gb_s)) <= time_ns(
        op, nbytes, asked
    )


@given(asked=communicators(), nbytes=st.integers(0, 2**35))
def test_an_all_reduce_takes_no_less_than_an_all_gather_unless_the_switch_reduces(
    asked: Communicator, nbytes: int
) -> None:
    """Between nodes this is so where bytes outweigh hops. An all-gather over 64 nodes of TCP waits
    for 63 of them, an all-reduce of a gigabyte for the levels of a tree."""
    ring = replace(asked, nvls=False)
    gathered = estimate("all_gather", nbytes, ring)
    if asked.num_nodes == 1 or nbytes > 16 * GIB:
        assert gathered.microseconds <= 1.2 * estimate("all_reduce", nbytes, ring).microseconds


@given(asked=communicators(), op=st.sampled_from(OPS), nbytes=st.integers(0, 2**35))
def test_the_band_holds_the_prediction_and_what_is_assumed_has_a_wider_one(
    asked: Communicator, op: str, nbytes: int
) -> None:
    predicted = estimate(op, nbytes, asked)
    assert 0 < predicted.low < predicted.microseconds < predicted.high
    if predicted.provenance == "assumed":
        known = estimate("all_reduce", nbytes, H100)
        assert predicted.high / predicted.microseconds >= known.high / known.microseconds


@given(asked=communicators(), op=st.sampled_from(OPS), nbytes=st.integers(8 * GIB, 64 * GIB))
def test_large_messages_approach_the_bandwidth_of_the_links(
    asked: Communicator, op: str, nbytes: int
) -> None:
    """75 % to 113 % (V100's links carry 22.4 where NCCL counts 20) of the bus bandwidth. Trees of
    two nodes cross once each way, for half of a ring's bytes. A broadcast's first chunk goes down
    the whole line. In an all-to-all a node's NICs carry what each of its ranks has for others."""
    ring = replace(asked, nvls=False)
    least = 0.45 if op == "all_reduce" and asked.num_nodes == 2 else 0.75
    factor = {"all_reduce": 2, "broadcast": 0}.get(op, 1) * (
        asked.num_ranks - 1
    ) / asked.num_ranks or 1
    if op == "all_to_all" and asked.num_nodes > 1:
        factor = asked.per_node * (asked.num_ranks - asked.per_node) / asked.num_ranks
    wire = nbytes * factor / 1000 / asked.bus_gb_s
    line = asked.num_ranks * 28 * 512 * KIB / 1000 / asked.bus_gb_s if op == "broadcast" else 0
    assert least * wire < estimate(op, nbytes, ring).microseconds < 1.35 * wire + line + 40_000


def test_a_generation_or_size_without_measurements_is_assumed_with_a_wider_band() -> None:
    measured, other = (
        estimate("all_gather", GIB, H100), estimate("all_gather", GIB, replace(H100, num_ranks=3)),
    )
    assert (measured.provenance, other.provenance) == ("calibrated", "assumed")
    assert other.high / other.microseconds > measured.high / measured.microseconds
    assert estimate("broadcast", GIB, H100).provenance == "assumed"
    assert estimate(
        "all_gather", GIB, replace(H100, generation="blackwell", bus_gb_s=720)
    ).provenance == ("assumed")


def test_latency_is_linear_in_ranks_for_an_all_gather_and_not_for_a_switchs_all_reduce() -> None:
    network = {"bus_gb_s": 360.0, "fabric": "ib", "generation": "hopper"}
    two, four, eight = (Communicator(num_ranks=8 * m, num_nodes=m, **network) for m in (2, 4, 8))
    times = [estimate("all_gather", 8, asked).microseconds for asked in (two, four, eight)]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=1e-4)
    reduced = [estimate("all_reduce", 8, asked).microseconds for asked in (two, four, eight)]
    assert reduced[2] - reduced[1] == pytest.approx(reduced[1] - reduced[0], rel=1e-4)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (4, 8), (16, 8), (2, 1), (64, 1)])
def test_an_all_to_all_over_m_nodes_has_m_over_m_minus_1_of_each_gpu_s_nic(
    nodes: int, per_node: int
) -> None:
    """NCCL's maintainer: with one GPU per node the bus bandwidth is the NIC's. On two nodes it is
    twice the NIC's, as half of the traffic stays inside. On M nodes of many GPUs it is M/(M − 1)
    times the NIC's (NVIDIA/nccl-tests issue 130)."""
    ranks = nodes * per_node
    group = Communicator(
        generation="hopper", num_ranks=ranks, num_nodes=nodes, bus_gb_s=50.0 * per_node,
        network_gb_s=50.0 * per_node, fabric="ib",
    )
    predicted = estimate("all_to_all", 64 * GIB, group)
    bus = 64 * GIB * (ranks - 1) / ranks / predicted.microseconds / 1000
    told = 50.0 * (nodes / (nodes - 1) if per_node > 1 else 1)
    assert bus == pytest.approx(told, rel=0.08)
    assert (predicted.algorithm, predicted.provenance) == ("pairs", "assumed")


def test_the_switch_s_tree_is_over_efa_on_two_nodes_alone() -> None:
    two, four = network("hopper", 16, 2, 360), network("hopper", 32, 4, 360)
    for group, fabric in ((two, "ib"), (four, "ib"), (two, "efa")):
        each = replace(group, fabric=fabric)
        assert estimate("all_reduce", GIB, each).algorithm == "nvls_tree"
    assert estimate("all_reduce", GIB, replace(four, fabric="efa")).algorithm == "ring"


def test_the_tree_of_two_nodes_is_no_wider_than_its_channels_carry_between_them() -> None:
    """NCCL's tuner gives all-reduces of 2 x 8 H100 246.2 GB/s: 8 channels of 57.7; the switch alone
    would carry 476 / 1.875 = 253.9."""
    two = network("hopper", 16, 2, 360)
    times = [estimate("all_reduce", size, two).microseconds for size in (64 * GIB, 128 * GIB)]
    assert 64 * GIB / (times[1] - times[0]) / 1000 == pytest.approx(246.2, rel=1e-3)


def test_a_tree_of_two_nodes_moves_no_more_than_their_nics_carry() -> None:
    """One NIC of 48 GB/s: each node sends the whole message once."""
    narrow = replace(network("hopper", 16, 2, 48), nics=1)
    for algorithm in ("nvls_tree", "tree"):
        forced = replace(narrow, algorithm=algorithm)
        assert estimate("all_reduce", GIB, forced).microseconds > GIB / 48e3


FLOORS: list[tuple[str, Communicator, float]] = [
    ("all_reduce", network("hopper", 16, 2, 360), 46),
    ("all_reduce", network("hopper", 16, 2, 192, "tcp"), 123),
    ("all_gather", replace(network("hopper", 16, 2, 360, "efa"), processor="amd"), 105),
    ("reduce_scatter", replace(network("hopper", 8, 2, 192), nics=4), 24),
]
"""Published times of 8 bytes: 2 nodes on InfiniBand (NVIDIA/nccl issue 1244), GPUDirect-TCPXO, EFA
(bottlerocket-kernel-kit issue 313), and 2 x 4 GPUs (nccl-tests issue 128)."""


@pytest.mark.parametrize(("op", "group", "microseconds"), FLOORS)
def test_latency_is_that_of_published_floors_by_fabric(
    op: str, group: Communicator, microseconds: float
) -> None:
    assert estimate(op, 8, group).microseconds == pytest.approx(microseconds, rel=0.25)


@pytest.mark.parametrize(("where", "least", "most"), [
    *((node(generation, 8), 15, 50) for generation in GENERATIONS),
    *((network("hopper", 16, 2, 8 * nic), 30, 50) for nic in (12, 24, 48, 96)),
    (network("ampere", 16, 2, 192), 30, 70), (network("hopper", 1024, 128, 384), 60, 200),
    (network("hopper", 16, 2, 384, "roce"), 30, 50),
    (network("hopper", 16, 2, 384, "efa"), 60, 250),
])
def test_an_all_reduce_of_a_kibibyte_takes_what_hosts_and_networks_are_known_to_take(
    where: Communicator, least: float, most: float
) -> None:
    """Microseconds: a launch and hops, whatever the network's bandwidth."""
    assert least < estimate("all_reduce", KIB, where).microseconds < most


P5: dict[str, dict[int, float]] = {
    "all_gather": {4: 229, 8: 178, 16: 127, 32: 77, 64: 44},
    "reduce_scatter": {4: 215, 8: 178, 16: 126, 32: 77, 64: 45},
    "all_reduce": {2: 436, 4: 219, 8: 193, 16: 188, 32: 194, 64: 177},
}
"""Bus GB/s of the best twentieth at 256 MiB, by nodes of a shared cluster of p5 (nanotron).

Rings in one of its nodes reach 265 GB/s, where others reach 322. So two nodes, whose time is that
of NVLink, have no gathers here."""


@pytest.mark.parametrize(("op", "nodes"), [(op, nodes) for op in P5 for nodes in P5[op]])
def test_growth_with_ranks_is_that_of_p5_of_2_to_64_nodes_within_a_fifth(
    op: str, nodes: int
) -> None:
    """No constant was fitted to them: NCCL's latencies, and the NIC's as its plugin declares it."""
    ranks = 8 * nodes
    group = communicator(p5 := load_cluster("p5", nodes=nodes), p5.path(tuple(range(ranks))))
    bus = (2 if op == "all_reduce" else 1) * 256 * MIB * (ranks - 1) / ranks
    reached = bus / estimate(op, 256 * MIB, group).microseconds / 1000
    assert reached == pytest.approx(P5[op][nodes], rel=0.2)


def test_a_band_is_wider_with_each_doubling_of_ranks_beyond_those_measured() -> None:
    widths = {}
    for nodes in (8, 16, 32, 128):
        predicted = estimate("all_gather", GIB, network("hopper", 8 * nodes, nodes, 360))
        widths[nodes] = predicted.high / predicted.microseconds - 1
    least = BETWEEN["ib"].large
    assert widths == pytest.approx({8: least, 16: 1.25 * least, 32: 1.5 * least, 128: 2 * least})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CUDA)
def test_every_preset_has_a_time_for_every_collective_inside_and_between_nodes(
    name: str, op: str
) -> None:
    cluster = load_cluster(name, nodes=2)
    inside, across = (
        LIBRARIES["nccl"].placed_ns(op, 64 * MIB, cluster=cluster, path=cluster.path(ranks))
        for ranks in (tuple(range(8)), tuple(range(16)))
    )
    assert 0 < inside <= across


def test_a_round_of_the_switch_has_a_chunk_of_each_rank() -> None:
    """72 GPUs have nine times the filling of 8, and the same bandwidth."""
    few, many = (
        estimate("all_reduce", 64 * GIB, replace(node("blackwell", n), algorithm="nvls"))
        for n in (8, 72)
    )
    assert many.microseconds - few.microseconds == pytest.approx(
        2 * 128 * KIB * 24 * (72 - 8) / (640 * 0.74 * 1000)
    )


def test_a_group_s_communicator_is_as_wide_as_its_narrowest_shared_place() -> None:
    cluster = load_cluster("p4d", nodes=4)
    rails = communicator(cluster, cluster.path(tuple(range(32))))
    strided = communicator(cluster, cluster.path((2, 10, 18, 26)))
    assert (rails.bus_gb_s, rails.num_nodes, rails.fabric) == (48, 4, "efa")
    assert (strided.bus_gb_s, strided.num_ranks, strided.num_nodes) == (6, 4, 4)


def test_a_collective_on_a_cluster_has_a_band_as_wide_as_its_constants_are_uncertain() -> None:
    inside, across = (
        estimated(
            "all_gather", GIB, cluster=load_cluster("dgx-h100", nodes=2), ranks=tuple(range(n))
        )
        for n in (8, 16)
    )
    assert (inside.provenance, across.provenance) == ("calibrated", "published")
    assert inside.high / inside.microseconds == pytest.approx(1 + MEASURED.large)
    assert across.high / across.microseconds == pytest.approx(1 + BETWEEN["ib"].large)


@pytest.mark.parametrize(("op", "steps"), [
    ("all_gather", 7), ("reduce_scatter", 7), ("all_reduce", 14)
])
def test_without_contention_the_ring_s_steps_and_its_sum_agree_on_large_messages(
    op: str, steps: int
) -> None:
    """256 GiB: the steps' bandwidth is what the search takes. Links reach 3 % more, and a fifth of
    a step is lost in each round; latency no longer counts."""
    cluster = load_cluster("dgx-h100")
    path = cluster.path(tuple(range(8)))
    by_steps = LIBRARIES["ring"].placed_ns(op, 256 * GIB, cluster=cluster, path=path)
    asked = replace(communicator(cluster, path), nvls=False)
    share = 1.03 / (1 + 0.2 / steps)
    assert time_ns(op, 256 * GIB, asked) * share == pytest.approx(by_steps, rel=0.001)


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(KeyError):
        estimate("gather", 8, H100)


def four_nics(ranks: int) -> Communicator:
    """Two nodes of A100 with four HDR each."""
    return replace(network("ampere", ranks, 2, 96), nics=4)


PUBLISHED: dict[str, tuple[str, int, Communicator, float, float]] = {
    "8 A100": ("all_reduce", 8 * GIB, node("ampere", 8), 231.6, 3.5),
    "8 A100, 1 GiB": ("all_reduce", GIB, node("ampere", 8), 228.1, 4.5),
    "8 H100": ("all_reduce", 8 * GIB, node("hopper", 8), 478.9, 1.1),
    "8 H200, rings": ("all_reduce", 16 * GIB, replace(node("hopper", 8), nvls=False), 367.6, 2.1),
    "8 H100, all-gather": ("all_gather", 256 * MIB, node("hopper", 8), 321.6, 7.0),
    "8 H100, reduce-scatter": ("reduce_scatter", 256 * MIB, node("hopper", 8), 304.5, 13.0),
    "2 x 4, 4 x 200 Gbit/s": ("all_reduce", 8 * GIB, four_nics(8), 95.1, 1.2),
    "2 x 8 A100, 4 x HDR": ("all_reduce", 8 * GIB, four_nics(16), 86.0, 11.0),
    "8 x 8 H100, 512 MiB": ("all_reduce", GIB // 2, network("hopper", 64, 8, 360), 356.0, 6.4),
    "8 x 8 H100, 8 GiB": ("all_reduce", 8 * GIB, network("hopper", 64, 8, 360), 387.0, 8.0),
    "32 x 8 H100": ("all_reduce", 2 * GIB, network("hopper", 256, 32, 360), 340.0, 4.2),
    "2 x 8 H100, TCPXO": ("all_reduce", 8 * GIB, network("hopper", 16, 2, 192, "tcp"), 339.0, 13.0),
    "2 p4d": ("all_reduce", GIB, replace(network("ampere", 16, 2, 48, "efa"), nics=4), 57.2, 43.0),
    "4 p4d": ("all_reduce", GIB, replace(network("ampere", 32, 4, 48, "efa"), nics=4), 29.6, 60.0),
    "72 GB200, 512 MiB": (
        "all_reduce", GIB // 2, replace(node("blackwell", 72), bus_gb_s=720), 586.0, 53.0
    ),
    "32 x 8 H100, all-gather": (
        "all_gather", 2 * GIB, network("hopper", 256, 32, 360), 200.0, 50.0
    ),
}
"""Bus GB/s as published, and by how many per cent NCCL's tuner is off, rounded as it was stated.

Two are further off. By a tree, which NCCL's search takes for two nodes, p4d would reach 82; what a
stack of that age took is not known. Large all-reduces of 8 nodes with SHARP have 8 %, and 512 MiB
6.4 for the tuner's 6.3.
"""


@pytest.mark.parametrize("case", PUBLISHED)
def test_what_is_calibrated_is_no_further_off_than_the_tuner(case: str) -> None:
    op, nbytes, asked, published, stated = PUBLISHED[case]
    passes = 2 if op == "all_reduce" else 1
    bus = (
        passes
        * nbytes
        * (asked.num_ranks - 1)
        / asked.num_ranks
        / estimate(op, nbytes, asked).microseconds
        / 1000
    )
    rounding = 0.5 if stated >= 10 else 0.05  # larger ones are stated in whole per cent
    assert 100 * abs(bus / published - 1) <= stated + rounding


@pytest.mark.parametrize("name", CUDA)
@pytest.mark.parametrize("op", OPS)
def test_a_rank_more_on_a_further_node_is_never_faster(name: str, op: str) -> None:
    """The fullest node has as many ranks as before, and the network comes to it. Latency alone, and
    a size at which bandwidth counts."""
    for full in (8, 16, 24, 32, 64):
        for nbytes in (1024, 46 * 1024, MIB, 64 * MIB):
            even, odd = (
                estimated(
                    op, nbytes, cluster=load_cluster(name, nodes=-(-ranks // 8), ranks=ranks),
                    ranks=tuple(range(ranks)),
                ).microseconds
                for ranks in (full, full + 1)
            )
            assert odd >= even, (full, nbytes)


def test_uneven_nodes_without_a_fullest_one_are_rounded_up() -> None:
    """Three ranks on 2 nodes are not PAT's: one node has 2 of them, and PAT's nodes have one each.
    """
    uneven = network("hopper", 3, 2, 48.0)
    assert uneven.per_node == 2
    assert estimate("all_gather", 1024, uneven).algorithm == "ring"


@pytest.mark.parametrize("cluster", CUDA)
def test_a_broadcast_to_more_ranks_of_a_node_is_never_faster(cluster: str) -> None:
    """Every link of its line carries the whole message; short rings of A100 lose bandwidth in the
    rounds of an all-reduce alone."""
    machine = load_cluster(cluster)
    for nbytes in (MIB, 256 * MIB, 32 * GIB):
        times = [
            estimated("broadcast", nbytes, cluster=machine, ranks=tuple(range(ranks))).microseconds
            for ranks in range(2, machine.devices_per_node + 1)
        ]
        assert times == sorted(times)


@pytest.mark.parametrize(("op", "algorithm", "where", "among"), [
    ("all_gather", "nvls", "all_gather of 8 ranks on 1 nodes of ampere", "ring"),
    ("all_reduce", "nvls", "all_reduce of 8 ranks on 1 nodes of ampere", "ring"),
    ("all_reduce", "pat", "all_reduce of 8 ranks on 1 nodes of hopper", "ring or nvls"),
])
def test_an_algorithm_that_cannot_run_is_refused_with_those_that_can(
    op: str, algorithm: Algorithm, where: str, among: str
) -> None:
    group = node("ampere" if "ampere" in where else "hopper", 8)
    with pytest.raises(ZsimError) as refused:
        estimate(op, MIB, replace(group, algorithm=algorithm))
    assert str(refused.value) == (
        f"{where}: expected algorithm {among}, found {algorithm}; or None for NCCL's own "
        f"choice"
    )


def with_latency(cluster: ClusterSpec, **ns: int) -> ClusterSpec:
    """`cluster` whose links of a kind have that latency."""
    kinds = {kind: replace(getattr(cluster.links, kind), latency=each) for kind, each in ns.items()}
    return replace(cluster, links=replace(cluster.links, **kinds))


@pytest.mark.parametrize("name", CUDA)
def test_every_cluster_has_the_hops_that_nccls_curves_are_of_and_shorter_ones_change_nothing(
    name: str
) -> None:
    cluster = load_cluster(name, nodes=2)
    ring = communicator(cluster, cluster.path(tuple(range(cluster.num_ranks))))
    assert (ring.longer_inside_us, ring.longer_between_us) == (0, 0)
    ranks, at_once = (
        tuple(range(cluster.num_ranks)), with_latency(cluster, fabric=0, pcie=0, rail=0),
    )
    for op in OPS:
        assert estimated(op, MIB, cluster=at_once, ranks=ranks) == estimated(
            op, MIB, cluster=cluster, ranks=ranks
        )


HOPS_OF: list[tuple[str, range, int, int]] = [
    ("all_gather", range(32), 3, 28), ("reduce_scatter", range(32), 3, 28),
    ("broadcast", range(32), 3, 28), ("all_reduce", range(32), 4, 2),
    ("all_gather", range(8), 0, 7), ("all_reduce", range(8), 0, 2),
    ("all_reduce", range(0, 32, 8), 4, 0), ("all_reduce", range(0, 24, 8), 4, 0),
    ("all_reduce", range(0, 16, 8), 2, 0),
]
"""Hops between and inside 4 nodes of H100. Rings go round once. All-reduces go down and up the two
levels of a tree, and inside a node through the switch."""


@pytest.mark.parametrize(("op", "ranks", "between", "inside"), HOPS_OF)
def test_longer_hops_than_nccls_own_add_to_each_that_a_message_makes(
    op: str, ranks: range, between: int, inside: int
) -> None:
    """Two rails more of 100 us add 200 us to a hop between nodes. Two edges of NVLink more of 10 us
    add 20 us to a hop inside a node."""
    cluster = load_cluster("dgx-h100", nodes=4)
    slow = with_latency(
        cluster, rail=cluster.links.rail.latency + 100_000,
        fabric=cluster.links.fabric.latency + 10_000,
    )
    usual, longer = (
        estimated(op, 64 * MIB, cluster=each, ranks=tuple(ranks)) for each in (cluster, slow)
    )
    more = 200 * between + 20 * inside
    assert longer.microseconds - usual.microseconds == pytest.approx(more)
    assert (usual.low - longer.low, longer.high - usual.high) == (
        pytest.approx(-0.5 * more), pytest.approx(1.5 * more),
    )
    assert longer.provenance == "assumed"
