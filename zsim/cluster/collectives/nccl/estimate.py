"""NCCL's choice of algorithm for a collective, and its time with an error band.

The time of each algorithm is in `zsim.cluster.collectives.nccl.durations`. Bytes on the wire, and
the explicit steps over links without other traffic, are the ring's. This module knows no stream and
no preset.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

from zsim.cluster.collectives.nccl import durations, measured_curves
from zsim.cluster.collectives.nccl.algorithms import algorithms
from zsim.cluster.collectives.nccl.bands import band
from zsim.cluster.collectives.nccl.channel_search import RINGS_IN_NODE
from zsim.cluster.collectives.nccl.communicator import Communicator, Estimate
from zsim.cluster.collectives.nccl.curves import CURVES, Curves
from zsim.cluster.collectives.nccl.durations import channels
from zsim.cluster.collectives.nccl.tuner import Algorithm
from zsim.cluster.collectives.ring import bytes_sent, duration_ns, steps
from zsim.errors import ZsimError, listed

__all__ = [
    "Communicator", "Estimate", "algorithms", "bytes_sent", "channels", "duration_ns", "estimate",
    "steps", "time_ns",
]

OF_LONGER_HOPS = 0.5
"""Half-width of the time that hops longer than NCCL's own add, as a share of it. Source:
assumed."""


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
            expected=f"algorithm {listed(among)}",
            found=str(communicator.algorithm),
            remedy="or None for NCCL's own choice",
        )
    fastest = min(
        (_by(algorithm, op, nbytes, communicator, curves) for algorithm in known),
        key=lambda each: each.microseconds,
    )
    if communicator.num_nodes == 1 or communicator.per_node == 1 or communicator.links == "pcie":
        return fastest
    return max(
        fastest, estimate(op, nbytes, _one_node(communicator), curves),
        key=lambda each: each.microseconds,
    )


def _by(
    algorithm: Algorithm, op: str, nbytes: int, communicator: Communicator, curves: Curves
) -> Estimate:
    """One algorithm's time, with what hops longer than NCCL's own add to it, of which no
    measurement is published."""
    parts = durations.by(algorithm, op, nbytes, communicator, curves.constants)
    total, (width, provenance) = parts.total, band(op, algorithm, communicator)
    own = curves.measured(algorithm, op, communicator)
    if own is not None:
        total = measured_curves.time_us(own, algorithm, op, nbytes, communicator)
        width, provenance = measured_curves.known_band(own, communicator)
    more, share = durations.longer_hops_us(algorithm, op, communicator), width.at(nbytes)
    return Estimate(
        microseconds=total + more,
        low=total * (1 - share) + more * (1 - OF_LONGER_HOPS),
        high=total * (1 + share) + more * (1 + OF_LONGER_HOPS),
        algorithm=algorithm,
        protocol=parts.protocol,
        provenance="assumed" if more else provenance,
    )


def _has_own_switch(communicator: Communicator, curves: Curves) -> bool:
    """True if `curves` were measured on such a node's own switch. In a domain of more ranks the
    switch has another curve."""
    return (
        communicator.num_nodes == 1
        and communicator.num_ranks <= 8
        and communicator.generation in curves.own_switch
    )


def _one_node(communicator: Communicator) -> Communicator:
    """One of its nodes alone, which the whole is never faster than: with many NICs a node is the
    narrower part."""
    counted, rate = RINGS_IN_NODE[communicator.generation]
    inside = min(counted * rate, communicator.inside_gb_s)
    return replace(
        communicator, num_ranks=communicator.per_node, num_nodes=1, fullest=0, algorithm=None,
        bus_gb_s=max(inside, communicator.bus_gb_s),
    )
