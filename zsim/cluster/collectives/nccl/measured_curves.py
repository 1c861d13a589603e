"""A cluster's own measured curves in place of NCCL's mechanisms.

A curve is t = floor + wire/share + Σ added · B/(B + half). Inside a node floor and added are in µs
of eight ranks. On a network they count in the tuner's latencies: the floor in those of small
messages, what is added in those of larger ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.collectives.nccl import durations
from zsim.cluster.collectives.nccl.algorithms import algorithms
from zsim.cluster.collectives.nccl.bands import CARRIED_OVER, CurveBand, band
from zsim.cluster.collectives.nccl.channel_search import NVLS_HEAD_GB_S, RINGS_IN_NODE
from zsim.cluster.collectives.nccl.communicator import Communicator, CurveProvenance
from zsim.cluster.collectives.nccl.constants import CONSTANTS
from zsim.cluster.collectives.nccl.curves import Curves
from zsim.cluster.collectives.nccl.tuner import GENERATIONS, HOPS, Algorithm, latency_us
from zsim.cluster.links import MeasuredCurve, Nccl

PROVENANCES: dict[str, CurveProvenance] = {
    "measured": "calibrated", "calibrated": "calibrated", "published": "published"
}
NOMINAL = replace(CONSTANTS, reached=dict.fromkeys(GENERATIONS, 1.0))
"""Links at the rates of presets and of the tuner, of which a curve's `share` is one."""
RANKS, NODES, NIC_GB_S = 8, 4, 24.0
"""Ranks of a node, and nodes and NICs of a network, on which mechanisms are drawn as a curve."""
LARGEST, STEPS = 2**36, 40
"""Bytes of a message of which latency is next to nothing; steps to find a part of what is added."""


def curves_of(cluster: ClusterSpec) -> Curves:
    """The constants of presets, with the curves that were measured on `cluster`."""
    return _curves(cluster.curves, cluster.nccl) if cluster.curves and cluster.nccl else Curves()


@lru_cache(maxsize=64)
def _curves(measured: tuple[MeasuredCurve, ...], node: Nccl) -> Curves:
    curves = Curves()
    for curve in measured:
        curves = with_curve(curves, curve, node)
    return curves


def with_curve(curves: Curves, measured: MeasuredCurve, node: Nccl) -> Curves:
    """The `curves` with `measured` for the generation and the network of `node`. With a measured
    curve of the switch, NCCL's own choice goes by that alone."""
    key = measured.scope, _place(measured.scope, node), measured.collective
    switch = {node.generation} if measured.scope == "nvls" else set()
    return replace(
        curves, own={**curves.own, key: measured}, own_switch=curves.own_switch | switch
    )


def _place(scope: str, node: Nccl) -> str:
    return node.fabric if scope == "network" else node.generation


def time_us(
    curve: MeasuredCurve, algorithm: Algorithm, op: str, nbytes: int, group: Communicator
) -> float:
    """The point of `curve` for a message of `nbytes` by `algorithm`.

    A ring of other than eight ranks has the floor of as many hops, and adds in proportion to its
    steps.
    """
    large = durations.by(algorithm, op, LARGEST, group, NOMINAL).wire
    wire = large * nbytes / LARGEST / curve.share
    floor, unit = curve.floor, 1.0
    if group.num_nodes > 1:
        quick, unit = _latencies_us(op, group)
        floor *= quick
    elif algorithm == "ring":
        passes = durations.passes(op)
        floor += passes * (group.num_ranks - RANKS) * HOPS["nvlink"]["ring"]["LL"]
        unit = (group.num_ranks - 1) / (RANKS - 1)
    added = sum(times * unit * nbytes / (nbytes + half) for times, half in curve.added)
    return max(1.0, floor) + wire + added


def _latencies_us(op: str, group: Communicator) -> tuple[float, float]:
    """The tuner's latencies of small and of larger messages: of a tree for all-reduces, of a ring
    for others."""
    tuned = durations.system(group, group.bus_gb_s)
    algorithm: Algorithm = "tree" if op == "all_reduce" else "ring"
    small, larger = (
        latency_us(durations.like(op), algorithm, protocol, tuned)
        for protocol in durations.SMALL_AND_LARGER
    )
    return small, larger


def known_band(
    curve: MeasuredCurve, group: Communicator
) -> tuple[CurveBand, CurveProvenance]:
    """The band of a measured curve: its own for what was measured, a wider one for rings of other
    than eight ranks."""
    own = CurveBand(large=curve.band, middle=curve.band_middle, small=curve.band_small)
    if group.num_nodes == 1 and group.num_ranks != RANKS:
        return CARRIED_OVER, "assumed"
    return own, PROVENANCES.get(curve.provenance, "assumed")


def as_it_is(curves: Curves, scope: str, collective: str, node: Nccl) -> MeasuredCurve | None:
    """The machine's own curve, else one drawn through the times of NCCL's mechanisms.

    None where the generation has no such switch.
    """
    known = curves.own.get((scope, _place(scope, node), collective))
    if known is not None or (scope == "nvls" and node.generation not in NVLS_HEAD_GB_S):
        return known
    return _drawn(scope, collective, node)


def _drawn(scope: str, collective: str, node: Nccl) -> MeasuredCurve:
    """A curve through the least and the largest time and two between."""
    group = _typical(scope, node)
    among = [each for each in algorithms(collective, group) if scope != "ring" or each == "ring"]

    def total(nbytes: int) -> float:
        return min(durations.by(each, collective, nbytes, group, CONSTANTS).total for each in among)

    slope = 2 * (total(LARGEST) - total(LARGEST // 2)) / LARGEST
    nominal = min(durations.by(each, collective, LARGEST, group, NOMINAL).wire for each in among)
    floor = total(1)
    added = max(0.0, total(LARGEST) - LARGEST * slope - floor)
    small, larger = _latencies_us(collective, group) if group.num_nodes > 1 else (1.0, 1.0)
    width, _ = band(collective, among[-1], group)

    def reached_at(share: float) -> int:
        """Bytes at which `share` of what is added is there."""
        low, high = 0, LARGEST
        for _ in range(STEPS):
            middle = (low + high) // 2
            is_below = total(middle) - middle * slope - floor < share * added
            low, high = (middle, high) if is_below else (low, middle)
        return max(1, high)

    return MeasuredCurve(
        scope="network" if group.num_nodes > 1 else "nvls" if scope == "nvls" else "ring",
        collective=collective, floor=floor / small, share=nominal / LARGEST / slope,
        added=tuple((added / 2 / larger, reached_at(share)) for share in (0.25, 0.75)),
        band=width.large, band_middle=width.middle, band_small=width.small, provenance="published",
        source=f"NCCL's mechanisms on {group.num_ranks} ranks of {node.generation}",
    )


def _typical(scope: str, node: Nccl) -> Communicator:
    """A node of eight ranks, or several with a NIC for each."""
    counted, rate = RINGS_IN_NODE[node.generation]
    nodes = NODES if scope == "network" else 1
    inside = counted * rate
    return Communicator(
        generation=node.generation, num_ranks=RANKS * nodes, num_nodes=nodes,
        bus_gb_s=min(inside, RANKS * NIC_GB_S) if nodes > 1 else inside, inside_gb_s=inside,
        fabric=node.fabric, processor=node.processor, links=node.links,
    )
