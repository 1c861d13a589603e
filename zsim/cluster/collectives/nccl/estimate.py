"""NCCL's choice of algorithm for a collective, its time, and the multiprocessors that it occupies.

The time of each algorithm is in `zsim.cluster.collectives.nccl.durations`. Bytes on the wire, and
the explicit steps over links without other traffic, are the ring's. This module knows no stream and
no preset.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

from zsim.cluster.cluster import Generation
from zsim.cluster.collectives.nccl import durations
from zsim.cluster.collectives.nccl.channel_search import FEWEST_NVLS_RANKS, RINGS_IN_NODE
from zsim.cluster.collectives.nccl.communicator import Communicator, Estimate
from zsim.cluster.collectives.nccl.curves import CURVES, Curves
from zsim.cluster.collectives.nccl.tuner import Algorithm
from zsim.cluster.collectives.ring import bytes_sent, duration_ns, steps
from zsim.errors import ZsimError

__all__ = [
    "Communicator", "Estimate", "algorithms", "bytes_sent", "channels", "duration_ns", "estimate",
    "steps", "time_ns",
]

CTAS: dict[Generation, tuple[int, int, int]] = {
    "volta": (24, 24, 16),
    "ampere": (24, 24, 16),
    "hopper": (24, 16, 16),
    "blackwell": (28, 24, 16),
}
"""Channels, each of which occupies a multiprocessor: of rings inside a node, of the switch, between
nodes (of Blackwell's 24 to 32 the middle; Volta as Ampere)."""
CTAS_OVER_PCIE = 4
CTAS_OF_RING, CTAS_OF_FAST_RING = 2, 4
"""Channels per ring between nodes, where each NIC has a ring. From Hopper on a ring has four where
two would not come to the most. Source: NCCL, graph/connect.cc; on nodes of fewer than 8 ranks it
takes four to reach the NICs' bandwidth."""


def time_ns(op: str, nbytes: int, communicator: Communicator, curves: Curves = CURVES) -> int:
    """Nanoseconds of `op` over a message of `nbytes` (the full one) alone on its links, rounded up;
    0 for one rank."""
    if communicator.num_ranks == 1:
        return 0
    return max(1, ceil(estimate(op, nbytes, communicator, curves).microseconds * 1000))


@lru_cache(maxsize=1 << 14)
def estimate(op: str, nbytes: int, communicator: Communicator, curves: Curves = CURVES) -> Estimate:
    """The estimate of `op` as nccl-tests would show it; KeyError for an unknown collective,
    ZsimError for an algorithm that cannot run it there."""
    among = algorithms(op, communicator)
    known = [algorithm for algorithm in among if communicator.algorithm in (None, algorithm)]
    if communicator.algorithm is None and _has_own_switch(communicator, curves) and "nvls" in known:
        known = ["nvls"]
    if not known:
        raise ZsimError(
            where=f"{op} of {communicator.num_ranks} ranks on {communicator.num_nodes} nodes of "
                  f"{communicator.generation}",
            expected=f"an algorithm among {', '.join(among)}",
            found=str(communicator.algorithm),
            remedy="or None for NCCL's own choice",
        )
    fastest = min(
        (durations.by(algorithm, op, nbytes, communicator, curves) for algorithm in known),
        key=lambda each: each.microseconds,
    )
    if communicator.num_nodes == 1 or communicator.per_node == 1 or communicator.links == "pcie":
        return fastest
    return max(
        fastest, estimate(op, nbytes, _one_node(communicator), curves),
        key=lambda each: each.microseconds,
    )


def algorithms(op: str, communicator: Communicator) -> tuple[Algorithm, ...]:
    """Algorithms among which NCCL chooses for `op`, as far as there is a model of them."""
    choices: list[Algorithm] = ["ring"]
    if op == "all_reduce" and _can_use_nvls(communicator):
        choices.append("nvls" if communicator.num_nodes == 1 else "nvls_tree")
    if (
        op in ("all_gather", "reduce_scatter")
        and communicator.per_node == 1
        and communicator.num_nodes > 1
    ):
        choices.append("pat")
    return tuple(choices)


def _has_own_switch(communicator: Communicator, curves: Curves) -> bool:
    """True if `curves` were measured on such a node's own switch. In a domain of more ranks the
    switch has another curve."""
    return (
        communicator.num_nodes == 1
        and communicator.num_ranks <= 8
        and communicator.generation in curves.own_switch
    )


def _can_use_nvls(communicator: Communicator) -> bool:
    """NVLS, or its tree between nodes; with EFA NCCL 2.27.7 stays with rings at 4 nodes of H200."""
    fewest = FEWEST_NVLS_RANKS.get(communicator.generation)
    wide_enough = fewest is not None and communicator.per_node >= fewest
    return communicator.nvls and communicator.links == "nvlink" and wide_enough and (
        communicator.num_nodes == 1 or communicator.fabric != "efa"
    )


def _one_node(communicator: Communicator) -> Communicator:
    """One of its nodes alone, which the whole is never faster than: with many NICs a node is the
    narrower part."""
    channels, rate = RINGS_IN_NODE[communicator.generation]
    inside = min(channels * rate, communicator.inside_gb_s)
    bus_gb_s = max(inside, communicator.bus_gb_s)
    return replace(
        communicator, num_ranks=communicator.per_node, num_nodes=1, fullest=0, algorithm=None,
        bus_gb_s=bus_gb_s,
    )


def channels(communicator: Communicator, algorithm: Algorithm) -> int:
    """Number of multiprocessors that a large collective occupies on each rank."""
    if communicator.links == "pcie":
        return CTAS_OVER_PCIE
    inside, in_the_switch, between = CTAS[communicator.generation]
    if communicator.num_nodes == 1:
        return in_the_switch if algorithm == "nvls" else inside
    few = CTAS_OF_RING * communicator.nics
    fast = communicator.generation in ("hopper", "blackwell") and few < between
    return min(between, CTAS_OF_FAST_RING * communicator.nics if fast else few)
