"""Time of each of NCCL's algorithms: the tuner's bandwidths and latencies, and curves calibrated on
published measurements.

The bandwidth of an algorithm is the tuner's (`zsim.cluster.collectives.nccl.tuner`). The time that
a measurement takes beyond that is in `zsim.cluster.collectives.nccl.curves`.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cluster.cluster import Generation
from zsim.cluster.collectives.nccl.channel_search import RINGS_IN_NODE, nvls_graph
from zsim.cluster.collectives.nccl.communicator import Communicator, Estimate
from zsim.cluster.collectives.nccl.curves import (
    CARRIED_OVER,
    WIDEST,
    Curve,
    CurveBand,
    CurveProvenance,
    Curves,
)
from zsim.cluster.collectives.nccl.tuner import (
    HOPS,
    NVLS_EFFICIENCY,
    NVLS_TREE_MOST,
    PAT_SHARE,
    RING_STEPS,
    Algorithm,
    Graph,
    System,
    latency_us,
)

EFFECT_OF_PCIE = 1.6
"""A ring over PCIe has 1.6 times the tuner's latency, as between nodes, for want of measurements on
PCIe."""
OF_LONGER_HOPS = 0.5
"""Half-width of the time that hops longer than NCCL's own add, as a share of it. Source:
assumed."""


def by(
    algorithm: Algorithm, op: str, nbytes: int, communicator: Communicator, curves: Curves
) -> Estimate:
    """One algorithm's time, with what hops longer than NCCL's own add to it, of which no
    measurement is published."""
    usual, more = (
        _over_usual_hops(algorithm, op, nbytes, communicator, curves),
        _longer_hops_us(algorithm, op, communicator),
    )
    if not more:
        return usual
    return replace(
        usual,
        microseconds=usual.microseconds + more,
        low=usual.low + more * (1 - OF_LONGER_HOPS),
        high=usual.high + more * (1 + OF_LONGER_HOPS),
        provenance="assumed",
    )


def _longer_hops_us(algorithm: Algorithm, op: str, communicator: Communicator) -> float:
    """µs that hops longer than NCCL's own add. A ring counts those that a part of the message makes
    one after another. All-reduces between nodes and PAT count the levels of a tree, once for each
    way."""
    inside, between = communicator.longer_inside_us, communicator.longer_between_us
    n, m, p = communicator.num_ranks, communicator.num_nodes, communicator.per_node
    if not (inside or between):
        return 0.0
    levels = (m - 1).bit_length()
    if algorithm == "nvls":
        return 2 * inside
    if algorithm == "pat":
        return levels * between
    if op == "all_reduce" and m > 1:
        return 2 * levels * between + (
            2 * inside if algorithm == "nvls_tree" else 2 * (p - 1) * inside
        )
    return _passes(op) * ((m - 1) * between + (n - m) * inside)


def _over_usual_hops(
    algorithm: Algorithm, op: str, nbytes: int, communicator: Communicator, curves: Curves
) -> Estimate:
    match algorithm:
        case "ring":
            return _ring(op, nbytes, communicator, curves)
        case "pat":
            return _pat(op, nbytes, communicator, curves)
        case "nvls" | "nvls_tree":
            return _nvls(nbytes, communicator, curves)
        case "tree":
            raise AssertionError("no time of a tree is modelled: `algorithms` never chooses one")


def _passes(op: str) -> int:
    """Number of times that the message goes round; a broadcast goes down the ring once."""
    return 1 if op == "broadcast" else RING_STEPS[op]


def _factor(op: str, num_ranks: int) -> float:
    """Message bytes to bytes that each link carries: 1 for a broadcast, steps/N otherwise."""
    return 1.0 if op == "broadcast" else RING_STEPS[op] * (num_ranks - 1) / num_ranks


def _ring(op: str, nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    """A ring: wire time at its narrowest link, and the curve of its node or of its network."""
    wire = nbytes * _factor(op, communicator.num_ranks) / (1000 * communicator.bus_gb_s)
    if communicator.num_nodes > 1:
        return _across(op, nbytes, communicator, curves, wire_us=wire, algorithm="ring")
    if communicator.links == "pcie":
        return _over_pcie(op, nbytes, communicator, wire)
    curve = curves.rings[communicator.generation, "all_gather" if op == "broadcast" else op]
    n = communicator.num_ranks
    lost = (
        curves.ring_share_lost.get(communicator.generation, 0.0)
        if n < 8 and op != "broadcast"
        else 0.0
    )
    share = curve.share - lost * (1 / n - 1 / 8)
    longer = _passes(op) * (n - 8) * HOPS["nvlink"]["ring"]["LL"]
    total = _on(curve, nbytes, wire / share, scale=(n - 1) / 7, more_us=longer)
    known = (
        curve.provenance == "calibrated"
        and op != "broadcast"
        and (n == 8 or n in _KNOWN_SIZES.get(communicator.generation, ()))
    )
    return _estimate(
        total, nbytes, curve.band if known else CARRIED_OVER, "ring",
        curve.provenance if known else "assumed",
    )


_KNOWN_SIZES: dict[Generation, range] = {
    "volta": range(2, 9), "ampere": range(2, 9), "hopper": range(4, 9)
}
"""Numbers of GPUs in a node for which there are measurements."""


def _nvls(nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    """All-reduce in the switch; between two nodes its tree crosses once each way, where a ring
    crosses twice."""
    generation, n, nodes = communicator.generation, communicator.num_ranks, communicator.num_nodes
    channels, rate = RINGS_IN_NODE[generation]
    graph = nvls_graph(generation, per_node=communicator.per_node)
    assert graph is not None
    whole = graph.channels * graph.intra * NVLS_EFFICIENCY[generation]
    if nodes == 1:
        curve, scale = (
            (curves.nvls[generation], 1.0) if n <= 8 else (curves.large_domain, _between(n, 8, 72))
        )
        wire = nbytes / (1000 * whole * communicator.bus_gb_s / (channels * rate) * curve.share)
        return _estimate(
            _on(curve, nbytes, wire, scale=scale), nbytes, curve.band, "nvls", curve.provenance
        )
    in_node = 2 * whole * (communicator.per_node - 1) / communicator.per_node
    most = graph.channels * NVLS_TREE_MOST[generation][0 if nodes == 2 else 1]
    bus = min(in_node, most, 2 * communicator.bus_gb_s) if nodes == 2 else communicator.bus_gb_s
    wire = nbytes * _factor("all_reduce", n) / (1000 * max(bus, communicator.bus_gb_s))
    return _across("all_reduce", nbytes, communicator, curves, wire_us=wire, algorithm="nvls_tree")


def _between(n: int, few: int, many: int) -> float:
    """Share between a fifth for the `few` ranks of one node and 1 for `many`, in proportion."""
    return 0.2 + 0.8 * (n - few) / (many - few)


def _pat(op: str, nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    """Logarithmic in nodes, at three quarters of the ring's bandwidth, with one GPU per node; no
    measurement is published."""
    wire = nbytes * _factor(op, communicator.num_ranks) / (1000 * communicator.bus_gb_s * PAT_SHARE)
    constants, _, _ = curves.crossing(communicator.fabric, op, communicator.generation)
    total = (
        constants.floor * latency_us(op, "pat", "Simple", _system(communicator))
        + wire / constants.share
    )
    return _estimate(total, nbytes, WIDEST, "pat", "assumed")


def _across(
    op: str, nbytes: int, communicator: Communicator, curves: Curves, *, wire_us: float,
    algorithm: Algorithm,
) -> Estimate:
    """A collective between nodes: the network's floor, its wire time, and what middle sizes add."""
    constants, band, provenance = curves.crossing(communicator.fabric, op, communicator.generation)
    system = _system(communicator)
    like = "all_gather" if op == "broadcast" else op
    quick = latency_us(like, "tree" if op == "all_reduce" else "ring", "LL", system)
    slow = _filling_us(like, system)
    added = sum(times * slow * nbytes / (nbytes + half) for times, half in constants.added)
    total = (
        constants.floor * quick
        + wire_us / (constants.share * _node_share(communicator, op))
        + added
    )
    return _estimate(total, nbytes, band, algorithm, provenance)


MEASURED_NODES = 4
"""Most nodes with measurements of middle sizes of all-reduces on networks without other traffic."""


def _filling_us(op: str, system: System) -> float:
    """Latency of a ring, µs, with which the time that middle and large messages add grows.
    All-reduces of more nodes go over to trees, which grow with the logarithm of nodes. Source:
    nanotron, 256 MiB, the best twentieth on a shared cluster of p5. Its all-reduces reach 219, 193,
    188, 194 and 177 GB/s at 4, 8, 16, 32 and 64 nodes. Its all-gathers fall from 229 to 44, as
    rings do."""
    few = system
    if op == "all_reduce" and system.num_nodes > MEASURED_NODES:
        few = replace(system, num_nodes=MEASURED_NODES, num_ranks=MEASURED_NODES * system.per_node)
    longer = (
        latency_us(op, "tree", "Simple", system) / latency_us(op, "tree", "Simple", few)
        if few is not system
        else 1.0
    )
    return latency_us(op, "ring", "LL128", few) * longer


def _node_share(communicator: Communicator, op: str) -> float:
    """Share of a network's bandwidth that rings reach. It is 98 % with A100 on InfiniBand (3 and 4
    nodes), and 102 % for all-reduces with H200 on EFA (4 nodes). It is all of it with B200, and
    where there is no measurement."""
    if communicator.generation == "ampere" and communicator.fabric not in ("efa", "tcp"):
        return 0.98
    return (
        1.02
        if (communicator.generation, communicator.fabric, op) == ("hopper", "efa", "all_reduce")
        else 1.0
    )


def _over_pcie(op: str, nbytes: int, communicator: Communicator, wire_us: float) -> Estimate:
    system = _system(communicator)
    like = "all_gather" if op == "broadcast" else op
    quick, slow = (latency_us(like, "ring", protocol, system) for protocol in ("LL", "Simple"))
    total = EFFECT_OF_PCIE * quick + wire_us + slow * nbytes / (nbytes + 32 * 2**20)
    return _estimate(total, nbytes, CurveBand(large=0.3, middle=0.5, small=0.5), "ring", "assumed")


def _system(communicator: Communicator) -> System:
    """The tuner's view, for its latencies alone: they do not depend on channels."""
    return System(
        generation=communicator.generation,
        num_ranks=communicator.num_ranks,
        num_nodes=communicator.num_nodes,
        fullest=communicator.per_node,
        ring=Graph(channels=1, intra=communicator.bus_gb_s, inter=communicator.bus_gb_s),
        processor=communicator.processor,
        links=communicator.links,
    )


def _on(
    curve: Curve, nbytes: int, wire_us: float, *, scale: float = 1.0, more_us: float = 0.0
) -> float:
    """A point of the curve; `scale` multiplies what middle sizes add, `more_us` the floor of longer
    or shorter rings."""
    added = sum(each.microseconds * scale * nbytes / (nbytes + each.half) for each in curve.added)
    return max(1.0, curve.floor_us + more_us) + wire_us + added


def _estimate(
    microseconds: float, nbytes: int, band: CurveBand, algorithm: Algorithm,
    provenance: CurveProvenance
) -> Estimate:
    share = band.at(nbytes)
    return Estimate(
        microseconds=microseconds,
        low=microseconds * (1 - share),
        high=microseconds * (1 + share),
        algorithm=algorithm,
        provenance=provenance,
    )
