"""NCCL's tuner as a pure selection model: the algorithm and protocol that it picks, and the time
that it believes in.

Source: NCCL 2.30.7 (src/graph/tuning.cc, topo.h), in our own words. Each algorithm and protocol has
a latency, made of a base and of hops, and a bandwidth, made of its channels and of caps. The
smallest sum wins. These times only choose. They are systematically too short below 1 GB, so
`zsim.cluster.collectives.nccl.estimate` calibrates the times of a simulation. GB/s are bytes per
nanosecond here, and times microseconds, as in NCCL's own tables. This module knows no cluster and
no preset.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Result of NCCL's channel search for one algorithm: channels, and GB/s of each inside a node
    and between nodes."""

    channels: int
    intra: float
    inter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A communicator as the tuner sees it.

    Without a switch that can reduce, `nvls` is None. The GPUs of a node are joined by `links`. The
    node with most ranks has `fullest`, or 0 for what NCCL's own tuner takes: as many for each node,
    rounded down.
    """

    generation: Generation
    num_ranks: int
    num_nodes: int
    fullest: int = 0
    ring: Graph
    nvls: Graph | None = None
    processor: Processor = "intel"
    links: Literal["nvlink", "pcie"] = "nvlink"
    has_ll128: bool = True

    @property
    def per_node(self) -> int:
        """Ranks per node."""
        return self.fullest or max(1, self.num_ranks // self.num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """One algorithm and protocol for one message: µs of latency, GB/s of the message, and the sum
    in µs."""

    algorithm: Algorithm
    protocol: Protocol
    latency_us: float
    gigabytes_per_s: float
    time_us: float


def hop_us(kind: str) -> float:
    """µs that NCCL takes a hop over links of a `kind` of `HOPS` to last for large messages: Ring
    Simple's."""
    return HOPS[kind]["ring"]["Simple"]


def num_steps(op: str, num_ranks: int) -> int:
    """Steps of a ring: 2(N−1) for all-reduce, N−1 for all-gather and reduce-scatter. KeyError for
    another collective."""
    return PASSES[op] * (num_ranks - 1)


def bus_factor(op: str, num_ranks: int) -> float:
    """Bus bandwidth over message bandwidth, by nccl-tests' convention: steps/N."""
    return num_steps(op, num_ranks) / num_ranks


def choose(op: str, nbytes: int, system: System) -> AlgorithmChoice:
    """NCCL's choice for a message of `nbytes` (the full one), by the smallest modelled time."""
    return min(choices(op, nbytes, system), key=lambda choice: choice.time_us)


def choices(op: str, nbytes: int, system: System) -> Iterator[AlgorithmChoice]:
    """Every algorithm and protocol that is enabled for `op` on `system`, with its modelled time for
    `nbytes`."""
    for algorithm, protocols in BASE.items():
        if not _is_enabled(algorithm, op, system):
            continue
        for protocol in protocols:
            if protocol not in HOPS["network"][algorithm] or (
                protocol == "LL128" and not system.has_ll128
            ):
                continue
            latency, rate = (
                latency_us(op, algorithm, protocol, system),
                rate_gb_s(op, algorithm, protocol, system),
            )
            latency *= plateau(op, nbytes, algorithm, protocol, system)
            rate *= tree_dip(nbytes) if algorithm == "tree" else 1.0
            yield AlgorithmChoice(
                algorithm=algorithm,
                protocol=protocol,
                latency_us=latency,
                gigabytes_per_s=rate,
                time_us=latency + nbytes / (1000 * rate),
            )


def _is_enabled(algorithm: Algorithm, op: str, system: System) -> bool:
    """All-gather and reduce-scatter run on rings, or on PAT with one GPU per node; trees and NVLS
    reduce everything."""
    if algorithm == "ring":
        return True
    if algorithm == "pat":
        return op != "all_reduce" and system.per_node == 1 and system.num_nodes > 1
    if op != "all_reduce":
        return False
    if algorithm == "tree":
        return system.num_nodes > 1
    has_nvls = (
        system.nvls is not None
        and system.nvls.channels >= 2
        and system.generation in NVLS_EFFICIENCY
    )
    return has_nvls and (algorithm == "nvls_tree") == (system.num_nodes > 1)


def plateau(
    op: str, nbytes: int, algorithm: Algorithm, protocol: Protocol, system: System
) -> float:
    """Factor of Ring Simple's latency between nodes, once a rank's part of a channel has 64 B: 1.4,
    or 1.9 on Volta."""
    per_part = nbytes / (system.ring.channels * system.num_ranks)
    concerned = (op, algorithm, protocol) == (
        "all_reduce", "ring", "Simple",
    ) and system.num_nodes > 1
    return (1.9 if system.generation == "volta" else 1.4) if concerned and per_part >= 64 else 1.0


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


def rate_gb_s(op: str, algorithm: Algorithm, protocol: Protocol, system: System) -> float:
    """GB/s of the whole message, from the channels' bandwidth and the caps of algorithm and
    protocol."""
    n = system.num_ranks
    if algorithm == "ring":
        return ring_bus_gb_s(protocol, system) / bus_factor(op, n)
    if algorithm == "tree":
        return 0.5 * tree_bus_gb_s(protocol, system)
    if algorithm == "pat":
        return PAT_SHARE * _bus(system.ring, system) / bus_factor(op, n)
    return _nvls_bus(op, system) / bus_factor(op, n)


def _bus(graph: Graph, system: System) -> float:
    """GB/s of all channels of `graph`. Up to two nodes the tuner takes a channel's rate inside a
    node, beyond that the rate between nodes. Where a ring leaves the node, the search has made the
    former no larger than the NICs allow."""
    return graph.channels * (graph.intra if system.num_nodes <= 2 else graph.inter)


def _column(system: System) -> int:
    """Column of a table for 1, 2 and more nodes."""
    return min(system.num_nodes, 3) - 1


def _ll_most(system: System) -> float:
    row = system.generation if system.num_nodes == 1 else LL_ROW[system.processor]
    return LL_MOST[row][_column(system)]


def ring_bus_gb_s(protocol: Protocol, system: System) -> float:
    """GB/s of bus bandwidth of a ring's channels with `protocol`."""
    bus = _bus(system.ring, system)
    if protocol == "LL":
        return min(_ll_most(system), LL_SHARE * bus)
    if protocol == "LL128":
        return min(LL128_SHARE * bus, system.ring.channels * RING_LL128[system.generation])
    return bus


def tree_bus_gb_s(protocol: Protocol, system: System) -> float:
    """GB/s of a tree's channels with `protocol`, twice what it carries of the message."""
    column, channels = _column(system), system.ring.channels
    bus = min(
        TREE_SHARE * _bus(system.ring, system), channels * TREE_MOST[system.generation][column]
    )
    if protocol == "LL":
        return min(bus / 3.8, _ll_most(system))
    if protocol == "LL128":
        return min(
            bus * (7 / 9 if system.num_nodes == 1 else 120 / 128),
            channels * TREE_LL128[system.generation][column],
        )
    return bus


def _nvls_bus(op: str, system: System) -> float:
    """The switch reduces: a channel carries its rate times NVLS's efficiency, twice for all-reduce,
    less its own head's part."""
    graph = system.nvls
    assert graph is not None
    channels, efficiency = graph.channels, NVLS_EFFICIENCY[system.generation]
    both_ways = 2 if op == "all_reduce" else (system.per_node - 1) / system.per_node
    per_channel = graph.intra * efficiency * (channels - 1) / channels * both_ways
    if system.num_nodes > 1:
        column = 0 if system.num_nodes == 2 else 1
        inter = graph.inter * (2 if system.num_nodes == 2 else 1)
        per_channel = min(per_channel, inter, NVLS_TREE_MOST[system.generation][column])
    return channels * per_channel


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
