"""Layouts of shaped networks and the clusters that predict steps on them."""

from __future__ import annotations

import pytest

from zsim.cluster.testbed import PAYLOAD, cluster_on, layout, with_slow_hosts
from zsim.errors import ArgumentError


def test_a_flat_layout_is_a_cluster_with_a_node_per_host() -> None:
    cluster = cluster_on(layout("4x1gbit,3=200mbit"))
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_ranks) == (4, 1, 4)
    assert cluster.path((0, 1)).bytes_per_s == round(10**9 / 8 * PAYLOAD)
    assert cluster.path((0, 1, 2, 3)).bytes_per_s == round(2 * 10**8 / 8 * PAYLOAD)


def test_ranks_of_a_node_are_joined_faster_than_nodes() -> None:
    cluster = cluster_on(layout("2x2x1gbit/200mbit"))
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 2)
    inside, between = cluster.path((0, 1)), cluster.path((0, 1, 2, 3))
    assert inside.bytes_per_s == round(10**9 / 8 * PAYLOAD)
    assert between.bytes_per_s == round(2 * 10**8 / 8 * PAYLOAD)


@pytest.mark.parametrize("rate", [12_345_678, 10**6, 999_999_999, 10**11])
def test_slow_hosts_are_told_to_the_bit(rate: int) -> None:
    slow = with_slow_hosts(layout("2x100gbit,0=3mbit"), {1: rate})
    assert slow.rates == (3 * 10**6, rate)
    assert layout(slow.text) == slow


@pytest.mark.parametrize(
    "text",
    ["", "4", "4x", "0x1gbit", "1x1gbit", "65x1gbit", "2x2x1gbit", "4x1gbit/1mbit",
     "4x1gbit,4=1mbit", "4x1bit", "4x1kbit", "4x900gbit", "4x1gbit;id", "-4x1gbit",
     "4x1gbit," * 200],
)
def test_another_text_is_no_layout(text: str) -> None:
    with pytest.raises(ArgumentError, match="testbed: expected"):
        layout(text)
