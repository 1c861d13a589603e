"""The law of capacity: no collective takes less time than its links need for its bytes, and more
bytes take no less."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.capacity import LeastTime, least
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.collectives import LIBRARIES
from zsim.cluster.links import Fabric

KIB, MIB, GIB = 2**10, 2**20, 2**30
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
NODES = (1, 2, 3, 4, 16, 128)
SIZES = (1, 32 * KIB, MIB, 16 * MIB, 256 * MIB, 16 * GIB)


@cache
def layout(name: str, nodes: int, per_node: int) -> ClusterSpec:
    """Nodes of a preset with as many devices as have a rank, and their part of the NICs."""
    if load_cluster(name).kind == "cpu":
        return load_cluster(name, nodes=nodes, ranks=nodes * per_node)
    cluster = load_cluster(name, nodes=nodes)
    nics = max(1, cluster.nics_per_node * per_node // cluster.devices_per_node)
    return replace(
        cluster, devices_per_node=per_node, nics_per_node=nics, num_ranks=nodes * per_node
    )


def predicted_ns(op: str, nbytes: int, cluster: ClusterSpec, ranks: tuple[int, ...]) -> int:
    path = cluster.path(ranks)
    return LIBRARIES[cluster.collectives].placed_ns(op, nbytes, cluster=cluster, path=path)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", clusters())
def test_no_prediction_moves_more_bytes_than_links_carry_and_more_bytes_take_no_less(
    name: str, op: str
) -> None:
    """Every preset, 1 to 128 nodes with 1, 3 or 8 ranks each, a byte to 16 GiB."""
    for nodes, per_node in product(NODES, (1, 3, 8)):
        if nodes * per_node == 1:
            continue
        cluster = layout(name, nodes, per_node)
        ranks = tuple(range(cluster.num_ranks))
        times = [predicted_ns(op, nbytes, cluster, ranks) for nbytes in SIZES]
        assert times == sorted(times), (nodes, per_node)
        for nbytes, ns in zip(SIZES, times, strict=True):
            bound = least(op, nbytes, cluster=cluster, ranks=ranks)
            assert ns >= bound.ns, (nodes, per_node, nbytes, bound.link)


@given(
    name=st.sampled_from(clusters()), op=st.sampled_from(OPS), nodes=st.integers(1, 128),
    left=st.integers(0, 7), nbytes=st.integers(1, 16 * GIB), more=st.integers(0, 16 * GIB),
    fabric=st.sampled_from(["ib", "roce", "efa", "tcp", "unknown"]),
    stride=st.sampled_from([1, 1, 2, 4, 8]),
)
def test_so_it_is_on_networks_of_all_kinds_with_nodes_that_are_not_full_and_groups_that_skip_ranks(
    name: str, op: str, nodes: int, left: int, nbytes: int, more: int, fabric: Fabric, stride: int
) -> None:
    cluster = load_cluster(name, nodes=nodes, ranks=max(2, 8 * nodes - left))
    if cluster.nccl is not None:
        cluster = replace(cluster, nccl=replace(cluster.nccl, fabric=fabric))
    ranks = tuple(range(0, cluster.num_ranks, stride))
    if len(ranks) < 2:
        return
    ns, longer = (
        predicted_ns(op, size, cluster, ranks) for size in (nbytes, nbytes + more)
    )
    assert least(op, nbytes, cluster=cluster, ranks=ranks).ns <= ns <= longer


BOUNDS = [
    ("dgx-h100", 1, "all_gather", LeastTime(7 * GIB * 10**9 // (8 * 450 * 10**9), 0)),
    ("dgx-a100", 1, "all_reduce", LeastTime(14 * GIB * 10**9 // (8 * 300 * 10**9), 0)),
    ("dgx-h100", 1, "all_reduce", LeastTime(7 * GIB * 10**9 // (8 * 450 * 10**9), 0)),
    ("p4d", 2, "all_gather", LeastTime(15 * GIB * 2 // (16 * 625), GIB // 2 // 50)),
    ("p4d", 4, "all_reduce", LeastTime(31 * GIB * 4 // (32 * 625), 6 * GIB // (4 * 50))),
    ("dgx-h100", 4, "all_reduce", LeastTime(31 * GIB // (32 * 500), GIB // 400)),
    ("dgx-h100", 2, "all_to_all", LeastTime(15 * GIB // (16 * 500), 4 * GIB // 400)),
    ("pcie-box", 1, "all_reduce", LeastTime(14 * GIB * 2 // (8 * 63), 0)),
    ("pcie-box", 2, "broadcast", LeastTime(GIB * 2 // 63, GIB * 2 // 25)),
]
"""Least times of a GiB by hand. A gather has 1 − 1/N of it to receive. NVLink of H100 carries 450
GB/s, of A100 300, and a node of p4d 4 × 12.5. InfiniBand's switches may reduce, EFA's not."""


@pytest.mark.parametrize(("name", "nodes", "op", "expected"), BOUNDS)
def test_the_least_time_is_that_of_the_data_sheets_by_hand(
    name: str, nodes: int, op: str, expected: LeastTime
) -> None:
    cluster = load_cluster(name, nodes=nodes)
    bound = least(op, GIB, cluster=cluster, ranks=tuple(range(8 * nodes)))
    assert (bound.device, bound.network) == pytest.approx((expected.device, expected.network))


def test_one_rank_moves_nothing_and_another_collective_is_an_error() -> None:
    cluster = load_cluster("dgx-h100")
    assert least("all_gather", GIB, cluster=cluster, ranks=(3,)) == LeastTime(0, 0)
    with pytest.raises(KeyError):
        least("gather", GIB, cluster=cluster, ranks=(0, 1))
