"""NCCL's own cost model: latencies of algorithms and protocols, bandwidths of rings and trees.

Source: NCCL 2.30.7 (src/graph/tuning.cc, topo.h), in our own words. A latency is made of a base and
of hops, a bandwidth of channels and of caps. NCCL adds them up to choose.
The sums are systematically too short below 1 GB, so `zsim.cluster.collectives.nccl.durations` has
sums of its own. GB/s are bytes per nanosecond here, and times microseconds, as in NCCL's own
tables. This module knows no cluster and no preset.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Literal

from zsim.cluster.collectives.ring import PASSES
from zsim.cluster.links import Generation, Processor

Algorithm = Literal["ring", "tree", "nvls", "nvls_tree", "pat", "pairs"]
Protocol = Literal["LL", "LL128", "Simple"]

GENERATIONS: tuple[Generation, ...] = ("volta", "ampere", "hopper", "blackwell")

# Source of every table below: NCCL 2.30.7, src/graph/tuning.cc; microseconds, or GB/s per channel
# where that is said.
BASE: dict[Algorithm, dict[Protocol, float]] = {
    "tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4},
    "ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4},
    "nvls": {"Simple": 0.0},
    "nvls_tree": {"Simple": 0.0},
    "pat": {"LL": 8.0, "LL128": 8.0, "Simple": 8.0},
}
HOPS: dict[str, dict[Algorithm, dict[Protocol, float]]] = {
    "nvlink": {
        "tree": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0},
        "ring": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
        "nvls": {"Simple": 25.0},
        "nvls_tree": {"Simple": 25.0},
        "pat": {"Simple": 4.0},
    },
    "pcie": {
        "tree": {"LL": 1.0, "LL128": 1.9, "Simple": 4.0},
        "ring": {"LL": 1.0, "LL128": 2.5, "Simple": 5.7},
        "pat": {"Simple": 4.0},
    },
    "network": {
        "tree": {"LL": 5.0, "LL128": 8.5, "Simple": 14.0},
        "ring": {"LL": 2.7, "LL128": 4.0, "Simple": 14.0},
        "nvls": {"Simple": 18.0},
        "nvls_tree": {"Simple": 20.9},
        "pat": {"Simple": 14.0},
    },
}
LL_MOST: dict[Generation, tuple[float, float, float]] = {
    "volta": (39.0, 39.0, 20.4),
    "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0),
    "blackwell": (282.0, 90.0, 70.0),
}
"""GB/s of LL on 1, 2 and more nodes. Between nodes NCCL looks up its row by processor: Intel reads
Volta's, AMD Ampere's."""
LL_ROW: dict[Processor, Generation] = {"intel": "volta", "amd": "ampere"}
RING_LL128: dict[Generation, float] = {
    "volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 40.0
}
TREE_LL128: dict[Generation, tuple[float, float, float]] = {
    "volta": (20.0, 20.0, 20.0),
    "ampere": (20.0, 20.0, 20.0),
    "hopper": (36.7, 36.7, 29.0),
    "blackwell": (55.6, 31.67, 20.0),
}
TREE_MOST: dict[Generation, tuple[float, float, float]] = {
    "volta": (26.5, 18.5, 10.0),
    "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0),
    "blackwell": (70.0, 42.8, 24.0),
}
NVLS_TREE_MOST: dict[Generation, tuple[float, float]] = {
    "hopper": (57.7, 45.5), "blackwell": (96.0, 80.0)
}
"""GB/s per channel on 2 and on more nodes."""
NVLS_EFFICIENCY: dict[Generation, float] = {"hopper": 0.85, "blackwell": 0.74}
NETWORK_OVERHEAD: dict[Processor, float] = {"intel": 1.0, "amd": 2.0}
"""µs that no ring step takes less of, once a ring leaves the node; three times as much for Simple.
"""
PAT_SHARE, TREE_SHARE, LL128_SHARE, LL_SHARE = 0.75, 0.92, 0.92, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Result of NCCL's channel search for one algorithm: channels, and GB/s of each."""

    channels: int
    gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A communicator as the tuner sees it.

    The GPUs of a node are joined by `links`, and `per_node` are ranks of the fullest.
    """

    generation: Generation
    num_ranks: int
    num_nodes: int
    per_node: int
    ring: Graph
    processor: Processor = "intel"
    links: Literal["nvlink", "pcie"] = "nvlink"


def hop_us(kind: str) -> float:
    """µs that NCCL takes a hop over links of a `kind` of `HOPS` to last for large messages: Ring
    Simple's."""
    return HOPS[kind]["ring"]["Simple"]


def num_steps(op: str, num_ranks: int) -> int:
    """Steps of a ring: 2(N−1) for all-reduce, N−1 for all-gather and reduce-scatter. KeyError for
    another collective."""
    return PASSES[op] * (num_ranks - 1)


def latency_us(op: str, algorithm: Algorithm, protocol: Protocol, system: System) -> float:
    """Base and hops, µs. A ring goes linearly in ranks, trees and PAT in the logarithm of nodes."""
    n, m, p = system.num_ranks, system.num_nodes, system.per_node
    base = BASE[algorithm][protocol]
    kind = system.links if p > 1 else "network"
    intra = HOPS[kind].get(algorithm, {}).get(protocol, HOPS["network"][algorithm][protocol])
    inter = HOPS["network"]["tree" if p == 1 and algorithm == "ring" else algorithm][protocol]
    levels = m.bit_length() - 1
    if algorithm == "ring":
        crossing = PASSES[op] * (m - 1)
        overhead = (
            NETWORK_OVERHEAD[system.processor] * (3 if protocol == "Simple" else 1)
            if m > 1
            else 0.0
        )
        return base + (num_steps(op, n) - crossing) * max(intra, overhead) + crossing * inter
    if algorithm == "tree":
        return base + 2 * ((p - 1) * intra + levels * inter)
    if algorithm == "pat":
        return base + levels * inter / 3.5 + 2.8 * n
    return base + intra + (2 * levels * inter if algorithm == "nvls_tree" else 0.0)


def _column(system: System) -> int:
    """Column of a table for 1, 2 and more nodes."""
    return min(system.num_nodes, 3) - 1


def _ll_most(system: System) -> float:
    row = system.generation if system.num_nodes == 1 else LL_ROW[system.processor]
    return LL_MOST[row][_column(system)]


def ring_bus_gb_s(protocol: Protocol, system: System) -> float:
    """GB/s of bus bandwidth of a ring's channels with `protocol`."""
    bus = system.ring.channels * system.ring.gb_s
    if protocol == "LL":
        return min(_ll_most(system), LL_SHARE * bus)
    if protocol == "LL128":
        return min(LL128_SHARE * bus, system.ring.channels * RING_LL128[system.generation])
    return bus


def tree_bus_gb_s(protocol: Protocol, system: System) -> float:
    """GB/s of a tree's channels with `protocol`, twice what it carries of the message."""
    column, channels = _column(system), system.ring.channels
    whole = channels * system.ring.gb_s
    bus = min(TREE_SHARE * whole, channels * TREE_MOST[system.generation][column])
    if protocol == "LL":
        return min(bus / 3.8, _ll_most(system))
    if protocol == "LL128":
        return min(
            bus * (7 / 9 if system.num_nodes == 1 else 120 / 128),
            channels * TREE_LL128[system.generation][column],
        )
    return bus


def tree_dip(nbytes: int) -> float:
    """Share of its bandwidth that a tree reaches: about half from 64 KiB to 2 MiB, nearly all below
    4 KiB and above 64 MiB.

    NCCL has a table by size and protocol; this is its rough shape, straight between these corners
    in log2 of the size.
    """
    corners = ((12, 1.0), (16, 0.5), (21, 0.5), (26, 1.0))
    exponent = log2(max(1, nbytes))
    for (left, low), (right, high) in pairwise(corners):
        if left <= exponent <= right:
            return low + (high - low) * (exponent - left) / (right - left)
    return 1.0
