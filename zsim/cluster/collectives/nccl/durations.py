"""Time of each of NCCL's algorithms: a start, the bytes on the narrowest link, and the filling of a
pipeline.

The start is a launch and the tuner's latencies, to which a NIC adds its own. Bandwidths are the
tuner's, of which links reach a share. The tuner omits that a rank has steps in which it only sends
or only receives. Its channels are half idle then, for the time of a chunk. Each protocol is such a
sum, and NCCL takes the protocol, and the algorithm, of which it is least. Nothing here is
fitted to one size, one collective or one number of ranks; `constants.py` has the constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.cluster.collectives.nccl.channel_search import RINGS_IN_NODE, nvls_graph
from zsim.cluster.collectives.nccl.communicator import Communicator
from zsim.cluster.collectives.nccl.constants import Constants
from zsim.cluster.collectives.nccl.tuner import (
    BASE,
    HOPS,
    LL_SHARE,
    NVLS_EFFICIENCY,
    NVLS_TREE_MOST,
    PAT_SHARE,
    Algorithm,
    Graph,
    Protocol,
    System,
    latency_us,
    ring_bus_gb_s,
    tree_bus_gb_s,
    tree_dip,
)
from zsim.cluster.collectives.ring import PASSES
from zsim.cluster.links import Generation

KIB, MIB = 2**10, 2**20
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
CHUNK: dict[Protocol, int] = {"Simple": 2 * MIB, "LL128": 512 * KIB, "LL": 32 * KIB}
"""Bytes of a channel's largest chunk. Source: NCCL's buffers of 4 MiB have 8 steps. A chunk has 4
of them with Simple and 1 with other protocols; half of LL's bytes are flags."""
BROADCAST_CHUNK = 512 * KIB
"""Bytes of a broadcast's largest chunk, one step with every protocol (BROADCAST_CHUNKSTEPS)."""
SMALL_AND_LARGER: tuple[Protocol, Protocol] = ("LL", "LL128")
"""Protocols whose latencies a network's measured curves count in."""
NVLS_CHUNK = 128 * KIB
NVLS_HALVED = (64, 8, 2)
"""A chunk of the switch is halved where a message has fewer rounds than this, again and again.
Source: NCCL, enqueue.cc."""
NVLS_STAGES = 3
"""Stages of a round in the switch, which run beside those of other rounds: scatter, reduce and
gather. All but one of them are without work at one end. Source: NCCL, device/all_reduce.h."""
SHARED_LINKS: tuple[Generation, ...] = ("volta",)
"""Generations whose channels share each link by two: one uses what the other leaves idle. Source:
all-reduces of 2 to 8 V100 lose nothing (VIA-Research/vTrain)."""
TWO_NODES_ONCE = 2
"""Times that a ring's bytes cross between two nodes over those of a tree, which go up and down
once. NCCL's search doubles the width of such trees (graph/search.cc)."""
MOST_IN_LL = 16 * KIB
"""Bytes to each other rank up to which pairs take LL (NCCL_P2P_LL_THRESHOLD)."""
SIMPLE_ALONE: tuple[tuple[str, Generation], ...] = (("efa", "ampere"),)
"""Networks without the protocols LL and LL128: EFA's sends of p4d do not keep order. Source:
aws-ofi-nccl, platform-aws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerms:
    """µs of one algorithm with one protocol."""

    algorithm: Algorithm
    protocol: Protocol = "Simple"
    start: float
    wire: float
    fill: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.start + self.wire + self.fill


def by(
    algorithm: Algorithm, op: str, nbytes: int, communicator: Communicator, constants: Constants
) -> TimeTerms:
    """The parts of `algorithm` with its fastest protocol, over hops as NCCL knows them."""
    among = {
        "ring": _rings, "tree": _trees, "nvls": _nvls, "nvls_tree": _nvls_tree, "pat": _pat,
        "pairs": _pairs,
    }
    return min(
        among[algorithm](op, nbytes, communicator, constants), key=lambda parts: parts.total
    )


def longer_hops_us(algorithm: Algorithm, op: str, communicator: Communicator) -> float:
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
    if algorithm == "pairs":
        return between if m > 1 else inside
    if algorithm == "pat":
        return levels * between
    if op == "all_reduce" and m > 1:
        return 2 * levels * between + (
            2 * inside if algorithm == "nvls_tree" else 2 * (p - 1) * inside
        )
    return passes(op) * ((m - 1) * between + (n - m) * inside)


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


def factor(op: str, num_ranks: int) -> float:
    """Message bytes to bytes that each link carries: 1 for a broadcast, steps/N otherwise."""
    return 1.0 if op == "broadcast" else PASSES[op] * (num_ranks - 1) / num_ranks


def like(op: str) -> str:
    """The collective whose latencies the tuner has for `op`: a broadcast goes round as an
    all-gather."""
    return "all_gather" if op == "broadcast" else op


def system(communicator: Communicator, gb_s: float) -> System:
    """The tuner's view of rings that carry `gb_s` together, one for each NIC where they leave a
    node.

    The search gives each ring two channels where there are few, from Hopper on.
    """
    rings = RINGS_IN_NODE[communicator.generation][0]
    if communicator.num_nodes > 1:
        rings = max(1, min(communicator.nics, communicator.per_node))
        if rings <= 4 and communicator.generation in ("hopper", "blackwell"):
            rings *= 2
    return System(
        generation=communicator.generation,
        num_ranks=communicator.num_ranks,
        num_nodes=communicator.num_nodes,
        per_node=communicator.per_node,
        ring=Graph(channels=rings, gb_s=gb_s / rings),
        processor=communicator.processor,
        links=communicator.links,
    )


def bus_gb_s(communicator: Communicator, constants: Constants) -> float:
    """GB/s of a ring: what NVLink reaches, or the NICs of the narrowest node where that is less.

    NCCL's search takes less of both, to have rings of equal speed. What it takes holds nothing up.
    """
    if communicator.links == "pcie" or communicator.per_node == 1:
        return communicator.bus_gb_s
    reached = constants.reached[communicator.generation]
    if communicator.num_nodes == 1:
        return communicator.bus_gb_s * reached
    network = communicator.network_gb_s or communicator.bus_gb_s
    return min(network, communicator.inside_gb_s * reached)


def passes(op: str) -> int:
    """Number of times that the message goes round; a broadcast goes down the ring once."""
    return 1 if op == "broadcast" else PASSES[op]


def _protocols(communicator: Communicator) -> tuple[Protocol, ...]:
    between = communicator.num_nodes > 1
    if between and (communicator.fabric, communicator.generation) in SIMPLE_ALONE:
        return ("Simple",)
    return ("LL", "Simple") if communicator.links == "pcie" else ("LL", "LL128", "Simple")


def _rings(op: str, nbytes: int, group: Communicator, constants: Constants) -> Iterator[TimeTerms]:
    """A ring: launch and hops, its bytes at the narrowest link, and the idle half of steps at its
    ends.

    Steps go one after another, N−1 for each pass. So latency grows with ranks, and between nodes
    with the NIC's own for every crossing.
    """
    gb_s = bus_gb_s(group, constants)
    tuned = system(group, gb_s)
    nic = constants.nic(group.fabric, group.generation)
    crossings = passes(op) * (group.num_nodes - 1)
    for protocol in _protocols(group):
        hops = latency_us(like(op), "ring", protocol, tuned)
        hops += crossings * (nic.small if protocol == "LL" else nic.large)
        rate = 1000 * ring_bus_gb_s(protocol, tuned)
        yield TimeTerms(
            algorithm="ring", protocol=protocol,
            start=constants.launch_us[group.generation] + hops,
            wire=nbytes * factor(op, group.num_ranks) / rate,
            fill=_filling_bytes(op, nbytes, protocol, group, constants) / rate,
        )


def _filling_bytes(
    op: str, nbytes: int, protocol: Protocol, group: Communicator, constants: Constants
) -> float:
    """Bytes of all channels in whose time the ring is not full.

    A broadcast's first chunk goes down the whole line. Others lose the idle halves of their first
    and last step, a chunk together. Rounds behind the first lose less, since they begin beside its
    end.
    """
    wide, n = channels(group, "ring"), group.num_ranks
    if op == "broadcast":
        return (n - 2) * min(nbytes, wide * min(BROADCAST_CHUNK, CHUNK[protocol]))
    if protocol == "LL" or group.links == "pcie" or group.generation in SHARED_LINKS:
        return 0.0
    part, chunk = nbytes / n, wide * CHUNK[protocol]
    rounds = max(1.0, part / chunk)
    return (1 + constants.idle * (rounds - 1)) * min(part, chunk)


def _trees(op: str, nbytes: int, group: Communicator, constants: Constants) -> Iterator[TimeTerms]:
    """Two binary trees between nodes, each for half of the message, and a chain inside each node.
    """
    gb_s = bus_gb_s(group, constants)
    twice = TWO_NODES_ONCE * gb_s if group.num_nodes == 2 else gb_s
    if group.per_node > 1:
        reached = constants.reached[group.generation] if group.links == "nvlink" else 1.0
        twice = min(twice, group.inside_gb_s * reached)
    tuned = system(group, twice)
    nic = constants.nic(group.fabric, group.generation)
    levels = group.num_nodes.bit_length() - 1
    for protocol in _protocols(group):
        hops = latency_us(op, "tree", protocol, tuned)
        hops += 2 * levels * (nic.small if protocol == "LL" else nic.tree)
        rate = min(gb_s, 0.5 * tree_bus_gb_s(protocol, tuned))
        yield TimeTerms(
            algorithm="tree", protocol=protocol,
            start=constants.launch_us[group.generation] + hops,
            wire=nbytes / (1000 * rate * tree_dip(nbytes)),
        )


def _nvls(op: str, nbytes: int, group: Communicator, constants: Constants) -> Iterator[TimeTerms]:
    """All-reduce in the switch of one node. A round has a chunk of every rank in each channel."""
    gb_s = _in_switch_gb_s(group)
    wide = CTAS[group.generation][1]
    chunk = NVLS_CHUNK
    for rounds in NVLS_HALVED:
        if nbytes >= rounds * wide * min(group.per_node, 8) * chunk:
            break
        chunk //= 2
    yield TimeTerms(
        algorithm="nvls",
        start=constants.launch_us[group.generation] + HOPS["nvlink"]["nvls"]["Simple"],
        wire=nbytes / (1000 * gb_s),
        fill=(NVLS_STAGES - 1) * chunk * max(8, group.num_ranks) * wide / (1000 * gb_s),
    )


def _nvls_tree(
    op: str, nbytes: int, group: Communicator, constants: Constants
) -> Iterator[TimeTerms]:
    """The switch in each node, and a tree between nodes. Between two nodes it crosses once each
    way, where a ring crosses twice."""
    generation, n = group.generation, group.num_ranks
    graph = nvls_graph(generation, per_node=group.per_node)
    assert graph is not None  # `algorithms` asks
    gb_s, two = bus_gb_s(group, constants), group.num_nodes == 2
    in_switch = _in_switch_gb_s(group)
    in_node = 2 * in_switch * (graph.channels - 1) / graph.channels
    most = graph.channels * NVLS_TREE_MOST[generation][0 if two else 1]
    bus = min(in_node, most, TWO_NODES_ONCE * gb_s if two else gb_s)
    rate = min(bus / factor(op, n), gb_s)
    levels = group.num_nodes.bit_length() - 1
    nic = constants.nic(group.fabric, generation)
    hops = latency_us(op, "nvls_tree", "Simple", system(group, gb_s)) + 2 * levels * nic.tree
    wide = channels(group, "nvls_tree")
    yield TimeTerms(
        algorithm="nvls_tree", start=constants.launch_us[generation] + hops,
        wire=nbytes / (1000 * rate),
        fill=(NVLS_STAGES - 1) * NVLS_CHUNK / 2 * graph.channels * wide / (1000 * in_switch),
    )


def _in_switch_gb_s(group: Communicator) -> float:
    """GB/s of the message that the tuner gives the switch of a node, in proportion to the links
    that its parts have."""
    graph = nvls_graph(group.generation, per_node=group.per_node)
    assert graph is not None  # `algorithms` asks
    counted, rate = RINGS_IN_NODE[group.generation]
    whole = counted * rate
    links = group.bus_gb_s if group.num_nodes == 1 else min(whole, group.inside_gb_s)
    return graph.channels * graph.gb_s * NVLS_EFFICIENCY[group.generation] * links / whole


def _pat(op: str, nbytes: int, group: Communicator, constants: Constants) -> Iterator[TimeTerms]:
    """Logarithmic in nodes, at three quarters of the ring's bandwidth, with one GPU per node; no
    measurement is published."""
    gb_s = bus_gb_s(group, constants)
    nic = constants.nic(group.fabric, group.generation)
    levels = group.num_nodes.bit_length() - 1
    yield TimeTerms(
        algorithm="pat",
        start=constants.launch_us[group.generation] + levels * nic.tree
        + latency_us(op, "pat", "Simple", system(group, gb_s)),
        wire=nbytes * factor(op, group.num_ranks) / (1000 * gb_s * PAT_SHARE),
    )


def _pairs(op: str, nbytes: int, group: Communicator, constants: Constants) -> Iterator[TimeTerms]:
    """Sends and receives of a rank, all at once. A node's NICs carry what its ranks have for those
    of other nodes. That is half of each message on two nodes, and nearly all of it on many. Source:
    NVIDIA/nccl-tests issue 130, an answer of NCCL's maintainer.

    What rings lose between nodes with large messages is no part of one send.
    """
    n, p, between = group.num_ranks, group.per_node, group.num_nodes > 1
    gb_s = bus_gb_s(group, constants)
    if between:
        network = group.network_gb_s or group.bus_gb_s
        gb_s = min(gb_s, network * (n - 1) / (p * (n - p)))
    hops = HOPS["network" if between else group.links]["ring"]
    first = constants.launch_us[group.generation]
    if between:
        first += constants.nic(group.fabric, group.generation).small
    protocols: tuple[Protocol, ...] = ("LL", "Simple") if nbytes <= n * MOST_IN_LL else ("Simple",)
    for protocol in protocols:
        rate = 1000 * gb_s * (LL_SHARE if protocol == "LL" else 1.0)
        yield TimeTerms(
            algorithm="pairs", protocol=protocol,
            start=first + BASE["ring"][protocol] + hops[protocol],
            wire=nbytes * factor(op, n) / rate,
        )
