"""How long NCCL's collectives take: the tuner's bandwidths, and curves calibrated on published measurements.

The tuner (`nccl_tuning`) says which algorithm runs and how wide it is; `nccl_curves` says what a measurement takes beyond
that. Bytes on the wire, and the explicit steps over links that nobody else uses, are the ring's. Knows no stream and no preset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import Literal

from zsim.collectives.nccl_curves import (
    CARRIED_OVER,
    CURVES,
    WIDEST,
    Band,
    Curve,
    CurveProvenance,
    Curves,
)
from zsim.collectives.nccl_search import FEWEST_NVLS_RANKS, RINGS_IN_NODE, nvls_graph
from zsim.collectives.nccl_tuning import (
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
from zsim.collectives.ring import bytes_sent, duration_ns, steps
from zsim.errors import ZsimError
from zsim.hardware import Fabric, Generation, Processor

__all__ = ["Communicator", "Estimate", "bytes_sent", "duration_ns", "estimate", "steps", "time_ns"]

EFFECT_OF_PCIE = 1.6
"""A ring over PCIe has 1.6 times the tuner's latency, as between nodes, for want of measurements on PCIe."""
OF_LONGER_HOPS = 0.5
"""Of what hops longer than NCCL's own add, how far it may be off on both sides."""


CTAS: dict[Generation, tuple[int, int, int]] = {
    "volta": (24, 24, 16),
    "ampere": (24, 24, 16),
    "hopper": (24, 16, 16),
    "blackwell": (28, 24, 16),
}
"""Channels, each of which occupies a multiprocessor: of rings inside a node, of the switch, between nodes (of Blackwell's 24 to 32 the
middle; Volta as Ampere)."""
CTAS_OVER_PCIE = 4
CTAS_OF_RING, CTAS_OF_FAST_RING = 2, 4
"""Between nodes there is a ring for each NIC, and two channels for each ring; from Hopper on four, where two would not come to the most
(NCCL, graph/connect.cc: on nodes of fewer than 8 ranks it takes four to reach the NICs' bandwidth)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A group of ranks as NCCL lays its rings over it. `bus_gb_s` is the ring's bus bandwidth: its narrowest shared place; `inside_gb_s`
    that of a ring inside a node where parts have fewer NVLinks than their generation, else no less than the generation's. `fullest` are
    the ranks of the node with most of them where nodes have not as many each, else 0."""

    generation: Generation
    num_ranks: int
    num_nodes: int
    fullest: int = 0
    bus_gb_s: float
    inside_gb_s: float = inf
    fabric: Fabric = "unknown"
    processor: Processor = "intel"
    links: Literal["nvlink", "pcie"] = "nvlink"
    nvls: bool = True
    nics: int = 8
    """Of a node, those over which its rings go."""
    longer_inside_us: float = 0.0
    longer_between_us: float = 0.0
    """What a hop inside a node, and one between nodes, takes beyond NCCL's own, which its curves have in them."""
    algorithm: Algorithm | None = None
    """The one that NCCL is made to take; None for its own choice."""

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node, for which the others wait."""
        return self.fullest or -(-self.num_ranks // self.num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """µs of one collective, its band, the algorithm, and where the widest of its constants comes from."""

    microseconds: float
    low: float
    high: float
    algorithm: Algorithm
    provenance: CurveProvenance


def time_ns(op: str, nbytes: int, communicator: Communicator, curves: Curves = CURVES) -> int:
    """Nanoseconds of `op` over a message of `nbytes` (the full one) alone on its links, rounded up; 0 for one rank."""
    if communicator.num_ranks == 1:
        return 0
    return max(1, ceil(estimate(op, nbytes, communicator, curves).microseconds * 1000))


@lru_cache(maxsize=1 << 14)
def estimate(op: str, nbytes: int, communicator: Communicator, curves: Curves = CURVES) -> Estimate:
    """What nccl-tests would show for `op`; KeyError for an unknown collective, ZsimError for an algorithm that cannot run it there."""
    among = algorithms(op, communicator)
    known = [one for one in among if communicator.algorithm in (None, one)]
    if communicator.algorithm is None and _has_own_switch(communicator, curves) and "nvls" in known:
        known = ["nvls"]
    if not known:
        raise ZsimError(
            where=f"{op} of {communicator.num_ranks} ranks on {communicator.num_nodes} nodes of {communicator.generation}",
            expected=f"an algorithm among {', '.join(among)}",
            found=str(communicator.algorithm),
            remedy="or None for NCCL's own choice",
        )
    found = min((_by(one, op, nbytes, communicator, curves) for one in known), key=lambda each: each.microseconds)
    if communicator.num_nodes == 1 or communicator.per_node == 1 or communicator.links == "pcie":
        return found
    return max(found, estimate(op, nbytes, _one_node(communicator), curves), key=lambda each: each.microseconds)


def algorithms(op: str, communicator: Communicator) -> tuple[Algorithm, ...]:
    """Those among which NCCL chooses for `op`, as far as there is a model of them."""
    found: list[Algorithm] = ["ring"]
    if op == "all_reduce" and _can_use_nvls(communicator):
        found.append("nvls" if communicator.num_nodes == 1 else "nvls_tree")
    if op in ("all_gather", "reduce_scatter") and communicator.per_node == 1 and communicator.num_nodes > 1:
        found.append("pat")
    return tuple(found)


def _has_own_switch(communicator: Communicator, curves: Curves) -> bool:
    """Whether `curves` were measured on such a node's own switch; in a domain of more ranks the switch has another curve."""
    return communicator.num_nodes == 1 and communicator.num_ranks <= 8 and communicator.generation in curves.own_switch


def _by(algorithm: Algorithm, op: str, nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    """One algorithm's time, and what longer hops than NCCL's own add to it: of that nobody has published a measurement."""
    found, more = _over_usual_hops(algorithm, op, nbytes, communicator, curves), _longer_hops_us(algorithm, op, communicator)
    if not more:
        return found
    return replace(
        found,
        microseconds=found.microseconds + more,
        low=found.low + more * (1 - OF_LONGER_HOPS),
        high=found.high + more * (1 + OF_LONGER_HOPS),
        provenance="assumed",
    )


def _longer_hops_us(algorithm: Algorithm, op: str, communicator: Communicator) -> float:
    """What hops that are longer than NCCL's own add: of a ring those that a part of the message makes one after another, of all-reduces
    between nodes and of PAT the levels of a tree, once for each way."""
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
        return 2 * levels * between + (2 * inside if algorithm == "nvls_tree" else 2 * (p - 1) * inside)
    return _passes(op) * ((m - 1) * between + (n - m) * inside)


def _over_usual_hops(algorithm: Algorithm, op: str, nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    if algorithm == "ring":
        return _ring(op, nbytes, communicator, curves)
    return _pat(op, nbytes, communicator, curves) if algorithm == "pat" else _nvls(nbytes, communicator, curves)


def channels(communicator: Communicator, algorithm: Algorithm) -> int:
    """How many multiprocessors a large collective occupies on each rank."""
    if communicator.links == "pcie":
        return CTAS_OVER_PCIE
    inside, in_the_switch, between = CTAS[communicator.generation]
    if communicator.num_nodes == 1:
        return in_the_switch if algorithm == "nvls" else inside
    few = CTAS_OF_RING * communicator.nics
    fast = communicator.generation in ("hopper", "blackwell") and few < between
    return min(between, CTAS_OF_FAST_RING * communicator.nics if fast else few)


def _one_node(communicator: Communicator) -> Communicator:
    """One of its nodes alone, which the whole is never faster than: with many NICs a node is the narrower part."""
    channels, rate = RINGS_IN_NODE[communicator.generation]
    inside = min(channels * rate, communicator.inside_gb_s)
    bus_gb_s = max(inside, communicator.bus_gb_s)
    return replace(communicator, num_ranks=communicator.per_node, num_nodes=1, fullest=0, algorithm=None, bus_gb_s=bus_gb_s)


def _passes(op: str) -> int:
    """How often the message goes round; a broadcast goes down the ring once."""
    return 1 if op == "broadcast" else RING_STEPS[op]


def _factor(op: str, num_ranks: int) -> float:
    """Message bytes to bytes that each link carries: 1 for a broadcast, steps/N otherwise."""
    return 1.0 if op == "broadcast" else RING_STEPS[op] * (num_ranks - 1) / num_ranks


def _ring(op: str, nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    """A ring: wire time at the narrowest place, and the curve of its node or of its network."""
    wire = nbytes * _factor(op, communicator.num_ranks) / (1000 * communicator.bus_gb_s)
    if communicator.num_nodes > 1:
        return _across(op, nbytes, communicator, curves, wire_us=wire, algorithm="ring")
    if communicator.links == "pcie":
        return _over_pcie(op, nbytes, communicator, wire)
    curve = curves.rings[communicator.generation, "all_gather" if op == "broadcast" else op]
    n = communicator.num_ranks
    lost = curves.ring_share_lost.get(communicator.generation, 0.0) if n < 8 and op != "broadcast" else 0.0
    share = curve.share - lost * (1 / n - 1 / 8)
    longer = _passes(op) * (n - 8) * HOPS["nvlink"]["ring"]["LL"]
    found = _on(curve, nbytes, wire / share, scale=(n - 1) / 7, more_us=longer)
    known = curve.provenance == "calibrated" and op != "broadcast" and (n == 8 or n in _KNOWN_SIZES.get(communicator.generation, ()))
    return _estimate(found, nbytes, curve.band if known else CARRIED_OVER, "ring", curve.provenance if known else "assumed")


_KNOWN_SIZES: dict[Generation, range] = {"volta": range(2, 9), "ampere": range(2, 9), "hopper": range(4, 9)}
"""Numbers of GPUs in a node for which there are measurements."""


def _can_use_nvls(communicator: Communicator) -> bool:
    """NVLS, or its tree between nodes; with EFA NCCL 2.27.7 stays with rings at 4 nodes of H200."""
    fewest = FEWEST_NVLS_RANKS.get(communicator.generation)
    wide_enough = fewest is not None and communicator.per_node >= fewest
    return communicator.nvls and communicator.links == "nvlink" and wide_enough and (
        communicator.num_nodes == 1 or communicator.fabric != "efa"
    )


def _nvls(nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    """All-reduce in the switch; between two nodes its tree crosses once each way, where a ring crosses twice."""
    generation, n, nodes = communicator.generation, communicator.num_ranks, communicator.num_nodes
    channels, rate = RINGS_IN_NODE[generation]
    graph = nvls_graph(generation, per_node=communicator.per_node)
    assert graph is not None
    whole = graph.channels * graph.intra * NVLS_EFFICIENCY[generation]
    if nodes == 1:
        curve, scale = (curves.nvls[generation], 1.0) if n <= 8 else (curves.large_domain, _between(n, 8, 72))
        wire = nbytes / (1000 * whole * communicator.bus_gb_s / (channels * rate) * curve.share)
        return _estimate(_on(curve, nbytes, wire, scale=scale), nbytes, curve.band, "nvls", curve.provenance)
    in_node = 2 * whole * (communicator.per_node - 1) / communicator.per_node
    most = graph.channels * NVLS_TREE_MOST[generation][0 if nodes == 2 else 1]
    bus = min(in_node, most, 2 * communicator.bus_gb_s) if nodes == 2 else communicator.bus_gb_s
    wire = nbytes * _factor("all_reduce", n) / (1000 * max(bus, communicator.bus_gb_s))
    return _across("all_reduce", nbytes, communicator, curves, wire_us=wire, algorithm="nvls_tree")


def _between(n: int, few: int, many: int) -> float:
    """From a fifth for the `few` ranks of one node to 1 for `many`, in proportion."""
    return 0.2 + 0.8 * (n - few) / (many - few)


def _pat(op: str, nbytes: int, communicator: Communicator, curves: Curves) -> Estimate:
    """Logarithmic in nodes, at three quarters of the ring's bandwidth, with one GPU per node; nobody has published a measurement."""
    wire = nbytes * _factor(op, communicator.num_ranks) / (1000 * communicator.bus_gb_s * PAT_SHARE)
    constants, _, _ = curves.crossing(communicator.fabric, op, communicator.generation)
    found = constants.floor * latency_us(op, "pat", "Simple", _system(communicator)) + wire / constants.share
    return _estimate(found, nbytes, WIDEST, "pat", "assumed")


def _across(
    op: str, nbytes: int, communicator: Communicator, curves: Curves, *, wire_us: float, algorithm: Algorithm
) -> Estimate:
    """A collective between nodes: the network's floor, its wire time, and what middle sizes add."""
    constants, band, provenance = curves.crossing(communicator.fabric, op, communicator.generation)
    system = _system(communicator)
    like = "all_gather" if op == "broadcast" else op
    quick = latency_us(like, "tree" if op == "all_reduce" else "ring", "LL", system)
    slow = _filling_us(like, system)
    added = sum(times * slow * nbytes / (nbytes + half) for times, half in constants.added)
    total = constants.floor * quick + wire_us / (constants.share * _node_share(communicator, op)) + added
    return _estimate(total, nbytes, band, algorithm, provenance)


MEASURED_NODES = 4
"""Nodes up to which middle sizes of all-reduces have been measured on networks that nobody else used."""


def _filling_us(op: str, system: System) -> float:
    """The latency that what middle and large messages add grows with: a ring's. All-reduces of more nodes go over to trees, which grow
    with the logarithm of nodes: the best twentieth on a shared cluster of p5 is 219, 193, 188, 194 and 177 GB/s at 4, 8, 16, 32 and 64
    nodes (nanotron, 256 MiB), where its all-gathers fall from 229 to 44 as rings do."""
    few = system
    if op == "all_reduce" and system.num_nodes > MEASURED_NODES:
        few = replace(system, num_nodes=MEASURED_NODES, num_ranks=MEASURED_NODES * system.per_node)
    longer = latency_us(op, "tree", "Simple", system) / latency_us(op, "tree", "Simple", few) if few is not system else 1.0
    return latency_us(op, "ring", "LL128", few) * longer


def _node_share(communicator: Communicator, op: str) -> float:
    """Of a network's bandwidth: what rings reach of it, 98 % with A100 on InfiniBand (3 and 4 nodes), 102 % of all-reduces with H200 on EFA
    (4 nodes), all of it with B200 and where nobody has measured."""
    if communicator.generation == "ampere" and communicator.fabric not in ("efa", "tcp"):
        return 0.98
    return 1.02 if (communicator.generation, communicator.fabric, op) == ("hopper", "efa", "all_reduce") else 1.0


def _over_pcie(op: str, nbytes: int, communicator: Communicator, wire_us: float) -> Estimate:
    system = _system(communicator)
    like = "all_gather" if op == "broadcast" else op
    quick, slow = (latency_us(like, "ring", protocol, system) for protocol in ("LL", "Simple"))
    total = EFFECT_OF_PCIE * quick + wire_us + slow * nbytes / (nbytes + 32 * 2**20)
    return _estimate(total, nbytes, Band(large=0.3, middle=0.5, small=0.5), "ring", "assumed")


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


def _on(curve: Curve, nbytes: int, wire_us: float, *, scale: float = 1.0, more_us: float = 0.0) -> float:
    """A point of the curve; `scale` multiplies what middle sizes add, `more_us` the floor of longer or shorter rings."""
    added = sum(each.microseconds * scale * nbytes / (nbytes + each.half) for each in curve.added)
    return max(1.0, curve.floor_us + more_us) + wire_us + added


def _estimate(
    microseconds: float, nbytes: int, band: Band, algorithm: Algorithm, provenance: CurveProvenance
) -> Estimate:
    share = band.at(nbytes)
    return Estimate(
        microseconds=microseconds,
        low=microseconds * (1 - share),
        high=microseconds * (1 + share),
        algorithm=algorithm,
        provenance=provenance,
    )
