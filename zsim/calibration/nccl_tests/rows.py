"""One row of nccl-tests, or of a like benchmark, and what the simulator's model of NCCL says of it.

The mapping from words to a communicator is the whole of it: `mapped` shows what was read and what
was assumed. No file format here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from zsim.calibration.nccl_tests import hardware_words, link_words, network_rates
from zsim.calibration.nccl_tests.note_words import UnmodelledError, told
from zsim.calibration.rows import shared_network
from zsim.cluster.cluster import Fabric
from zsim.cluster.collectives.nccl.channel_search import PCIE_GB_S, Rails, between_nodes, in_node
from zsim.cluster.collectives.nccl.curves import CURVES, TORCH_US, CurveProvenance, Curves
from zsim.cluster.collectives.nccl.estimate import Communicator, algorithms, estimate

PCIE_RING_GB_S = 20.0
"""A ring of 4 or more GPUs over PCIe 4: 20 GB/s across bridged pairs of A100 (NVIDIA/nccl-tests
issue 178)."""

@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRow:
    """A measurement: `size_bytes` of the full message, µs, and the words around it. `microseconds`
    is None for a mere question."""

    collective: str
    gpu: str
    n_ranks: int
    n_nodes: int
    size_bytes: int
    intra_node: str = ""
    inter_node: str = ""
    nccl_version: str = ""
    tool: str = "nccl-tests"
    notes: str = ""
    microseconds: float | None = None
    origin: str = ""
    """Who measured, as the file says."""
    source: str = ""
    """The file."""
    line: int = 0
    assumed: tuple[str, ...] = ()
    """What was read into the row besides its words."""
    cautions: tuple[str, ...] = ()
    """What is to be known of the row, and changes nothing of its prediction."""
    bandwidth_agrees: bool = False
    """Whether the row says a bandwidth, which its size and time agree with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """µs, the band in which a measurement is expected, where the constants come from, and what had
    to be assumed."""

    microseconds: float
    low: float
    high: float
    provenance: CurveProvenance
    algorithm: str
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """The communicator that a row describes, whether torch called it, whether others used the
    network, and what was assumed."""

    communicator: Communicator
    through_torch: bool
    shared: bool
    assumed: tuple[str, ...]
    otherwise: tuple[Communicator, ...] = ()
    """What its words may mean as well: the band covers their predictions too."""


class UnknownGpuError(ValueError):
    """A GPU that NCCL's model does not know."""


def predict(row: NcclRow, *, curves: Curves = CURVES, apart: Mapped | None = None) -> Prediction:
    """What `row` should have measured, by `curves` and for the communicator in `apart` where they
    are given.

    UnknownGpuError for a GPU without a model, KeyError for an unknown collective.
    """
    found = apart or mapped(row)
    communicator = _among_others(found.communicator) if found.shared else found.communicator
    alone = estimate(row.collective, row.size_bytes, communicator, curves)
    more = TORCH_US if found.through_torch else 0.0
    microseconds, low, high = alone.microseconds + more, alone.low + more, alone.high + more
    provenance = alone.provenance
    if found.assumed:
        low, high, provenance = low / 1.5, high * 1.5, "assumed"
    for other in found.otherwise:
        also = estimate(
            row.collective, row.size_bytes, _among_others(other) if found.shared else other, curves
        )
        low, high = min(low, also.low + more), max(high, also.high + more)
    if found.shared:
        microseconds, low, high = _congested(row, microseconds, low, high)
    return Prediction(
        microseconds=microseconds,
        low=low,
        high=high,
        provenance=provenance,
        algorithm=alone.algorithm,
        assumed=(*found.assumed, *row.cautions),
    )


def _among_others(communicator: Communicator) -> Communicator:
    """On a network that others use as well less of its bandwidth is left; a node is not crossed."""
    nodes = communicator.num_nodes
    return (
        replace(communicator, bus_gb_s=communicator.bus_gb_s * shared_network.bandwidth_left(nodes))
        if nodes > 1
        else communicator
    )


def _congested(
    row: NcclRow, microseconds: float, low: float, high: float
) -> tuple[float, float, float]:
    """Where others use the network as well: rings of one node are longer too, times of several 0.3
    to 3 times that."""
    if row.n_nodes > 1:
        return (
            microseconds, min(low, microseconds * shared_network.BAND[0]),
            max(high, microseconds * shared_network.BAND[1]),
        )
    if row.collective == "all_reduce":
        return microseconds, low, high
    return microseconds * shared_network.IN_NODE, low, high * shared_network.IN_NODE


def mapped(row: NcclRow) -> Mapped:
    """The row's words as a communicator. UnknownGpuError for a GPU without a model, UnmodelledError
    for an algorithm without one."""
    part = hardware_words.part(row.gpu, row.intra_node)
    if part is None:
        raise UnknownGpuError(row.gpu)
    domain = (
        hardware_words.NVLINK_DOMAIN
        if "NVL72" in f"{row.gpu} {row.intra_node}".upper() or part.name in ("GB200", "GB300")
        else 0
    )
    nodes = -(-row.n_ranks // domain) if domain else row.n_nodes
    per_node = max(1, row.n_ranks // nodes)
    words = f"{row.tool} {row.intra_node}"
    ran = told(
        row.notes, words, num_ranks=row.n_ranks, num_nodes=row.n_nodes, nbytes=row.size_bytes
    )
    assumed = [
        *row.assumed,
        *(f"notes {unread!r} change nothing: they are not understood" for unread in ran.unread),
    ]
    through_torch = hardware_words.through_torch(row.tool) or (
        ran.through_torch and not row.tool.strip()
    )
    if ran.through_torch and not through_torch:
        assumed.append(f"{row.tool.strip()[:40]} as the tool: notes contradict it, for they say "
                       f"torch")
    if per_node > 1:
        part = _joined(
            row, part, per_node, in_domain=domain > 0 and part.generation == "blackwell",
            assumed=assumed,
        )
    inside = _inside(part, per_node, assumed)
    rates = _rates(row, part, per_node, assumed) if nodes > 1 else []
    widest = inside if per_node > 1 else inf
    bus, *others = [min(widest, _between(part, per_node, rate)) for rate in rates] or [inside]
    links: Literal["nvlink", "pcie"] = "pcie" if part.links == "pcie" else "nvlink"
    communicator = Communicator(
        generation=part.generation, num_ranks=row.n_ranks, num_nodes=nodes, bus_gb_s=bus,
        inside_gb_s=inside, fabric=_fabric(row, assumed) if nodes > 1 else "unknown",
        processor="amd" if part.generation == "ampere" else "intel", links=links,
        nvls=hardware_words.has_nvls(f"{row.notes} {words}", row.nccl_version)
        and not ran.no_switch, algorithm=ran.algorithm,
    )
    if ran.algorithm and ran.algorithm not in algorithms(row.collective, communicator):
        raise UnmodelledError(f"{ran.algorithm} for {row.collective} on {part.name}, "
                              f"{row.n_ranks} ranks on {nodes} nodes: no model of it")
    return Mapped(
        communicator=communicator,
        through_torch=through_torch,
        shared=hardware_words.is_shared(row.inter_node),
        assumed=tuple(assumed),
        otherwise=tuple(replace(communicator, bus_gb_s=other) for other in others),
    )


def _joined(
    row: NcclRow, part: hardware_words.Part, per_node: int, *, in_domain: bool, assumed: list[str]
) -> hardware_words.Part:
    """The part with the links that its row says join the GPUs of a node; UnmodelledError for ways
    that there is no model of."""
    link_words.check(row.intra_node)
    if unread := link_words.unread(row.intra_node):
        assumed.append(f"intra_node {unread!r} changes nothing: it is not understood")
    if part.links == "nvlink" and link_words.is_bridged(row.intra_node):
        assumed.append(link_words.bridged(per_node))
        part = replace(part, links="pcie") if per_node > 2 else part
    assumed += link_words.taken(
        row.gpu, part.name, links=part.links, per_node=per_node, in_domain=in_domain
    )
    return part


def _inside(part: hardware_words.Part, per_node: int, assumed: list[str]) -> float:
    if part.links == "pcie":
        assumed.append(f"{PCIE_RING_GB_S:g} GB/s for a ring over PCIe")
        return PCIE_RING_GB_S
    ring = in_node(part.generation, per_node)
    return ring.channels * ring.intra * part.nvlink_share


def _fabric(row: NcclRow, assumed: list[str]) -> Fabric:
    if not hardware_words.is_ethernet(row.inter_node):
        return hardware_words.fabric(row.inter_node)
    assumed.append("Ethernet as TCP, for the row does not say RDMA")
    return "tcp"


def _rates(
    row: NcclRow, part: hardware_words.Part, per_node: int, assumed: list[str]
) -> list[float]:
    """GB/s of a node's network as sold: the one that the row is taken for, and what its words may
    mean as well."""
    most = PCIE_GB_S[part.generation] / 0.96
    is_efa = hardware_words.fabric(row.inter_node) == "efa"
    usual = (hardware_words.EFA_NODE_GB_S if is_efa else hardware_words.DEFAULT_NODE_GB_S)[
        part.generation
    ]
    found = network_rates.taken(row.inter_node, per_node=per_node, most=most)
    if found is None:
        node = usual * (per_node / 8 if per_node > 8 else 1)
        assumed.append(f"{node:g} GB/s of network per node")
        return [node]
    node, other = found.gb_s, found.other
    assumed += found.assumed
    if found.instead is not None:
        return [node, found.instead]
    if other is None or (is_efa and node == usual):
        return [node]
    if hardware_words.is_plain(row.inter_node):
        node, other = sorted((node, other))
    said = f"{8 * min(node, other):g} Gbit/s"
    taken, also = f"for each of {per_node} GPUs", "for the whole node"
    if node < other:
        taken, also = also, taken
    assumed.append(f"{said} {taken}; the band covers {said} {also}, which its words may mean as "
                   f"well")
    return [node, other]


def _between(part: hardware_words.Part, per_node: int, node_gb_s: float) -> float:
    """Bus bandwidth of rings between nodes, GB/s: the NICs' share of each GPU, as NCCL counts it.
    """
    graph = between_nodes(part.generation, Rails(count=per_node, line_gb_s=node_gb_s / per_node))
    return graph.channels * graph.inter


def question(row: NcclRow) -> NcclRow:
    """The row without its answer: what a prediction may look at."""
    return replace(row, microseconds=None)
