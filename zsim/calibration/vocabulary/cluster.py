"""Which cluster preset a row ran on: the GPU's part, how many make a node, and what its network
carries.

Presets have nodes of eight. A network between those that presets of the part have is one of them
with slower links, a faster one is refused by name; where a row of several nodes says nothing of it,
the preset's is assumed, and the band wider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from zsim.calibration.nccl_tests import hardware_words, network_rates
from zsim.calibration.rows import shared_network
from zsim.calibration.rows.checks import Assumed
from zsim.calibration.rows.records import Record, RowError
from zsim.calibration.vocabulary.gpu import Part, is_sized, part_of
from zsim.cluster.cluster import Fabric, clusters, load_cluster
from zsim.cluster.collectives.nccl.channel_search import PCIE_GB_S

NODE = 8
_SAYS_WHOSE = re.compile(
    r"/(?!s\b)|\bper\b|\d\s*[x×*]|[x×*]\s*\d|node|gpu|nic|host|server|instance|[ -]rail\b",
    re.IGNORECASE,
)
"""Words that say whose a rate is: a node's or a NIC's. The slash of "Gb/s" does not, nor does a
cable's name."""
RATES_AGREE = 0.1
AS_SOLD = 0.96
"""NCCL counts 12 GB/s of a NIC of 100 Gbit/s, which is sold as 12.5."""
ANOTHER_FABRIC, UNSAID = 0.05, 0.1
"""How much wider a band is for a network of another kind with the same rate, and for one of which
the row says nothing."""
ANOTHER_GPU = 0.3
"""And for a GPU that nobody has published steps of: as for constants that are all assumed
(`bands.COMPUTE`)."""
SIZE_UNSAID = 0.05
"""And for a GPU of which the row does not say which of the model's memories it has: that of A100 40
GB is a quarter slower, of a step in which a fifth is bound by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A preset, GB/s of each of its NICs where they are slower than the preset's, and the kind of
    network where it is another."""

    preset: str
    nic_gb_s: float = 0.0
    fabric: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs of a row: their part, the preset of their nodes, how many nodes and ranks.

    `nic_gb_s` is what each NIC's link carries for this job where that is less than the preset's,
    else 0; `fabric` the kind of network where it is another, else "". `otherwise` are the machines
    that the row's words may mean as well.
    """

    part: Part
    preset: str
    nodes: int
    ranks: int
    nic_gb_s: float = 0.0
    fabric: str = ""
    otherwise: tuple[Machine, ...] = ()

    @property
    def table(self) -> dict[str, object]:
        """The scenario's table."""
        found: dict[str, object] = {"preset": self.preset, "nodes": self.nodes, "ranks": self.ranks}
        if self.nic_gb_s:
            found["nic_bandwidth"] = f"{self.nic_gb_s:.6g} GB/s"
        if self.fabric:
            found["fabric"] = self.fabric
        return found


def among_others(place: Machine) -> Machine:
    """`place` with what is left of its network where others use it as well; as it is where a single
    node uses none."""
    if place.nodes == 1:
        return place
    whole = place.nic_gb_s or load_cluster(place.preset).links.rail.bandwidth / 1e9
    left, others = (
        whole * shared_network.bandwidth_left(place.nodes),
        tuple(map(among_others, place.otherwise)),
    )
    return replace(place, nic_gb_s=left, otherwise=others)


def machine(record: Record, assumed: Assumed) -> Machine:
    """What the row's columns say of its machine; RowError where no preset is like it."""
    gpu, ranks = record.text("gpu"), _ranks(record, assumed)
    part = part_of(gpu)
    if not is_sized(gpu):
        assumed.add(f"an {part.words}", widens=SIZE_UNSAID)
    if part.less:
        assumed.add(part.less, widens=ANOTHER_GPU)
    nodes = _nodes(record, ranks, assumed)
    words = network_words(record)
    joined = re.search(
        r"NVLINK|NVSWITCH", re.sub(r"\b(NO|WITHOUT|NOT)\s+NV(LINK|SWITCH)", "", words.upper())
    )
    if part.form == "SXM" and re.search(r"\bPCI-?E?\b", words.upper()) and not joined:
        raise RowError(f"interconnect: expected GPUs joined by NVLink, found {words[:60]!r}")
    inside = record.text("intra_node", "").upper()
    if inside and part.form == "SXM" and not re.search("NVLINK|NVSWITCH|SXM|HGX|DGX", inside):
        assumed.add("NVLink between the GPUs of a node", widens=UNSAID)
    networks = _networks_of(record, part, words, nodes, assumed)
    main, *others = (
        Machine(
            part=part, preset=one.preset, nodes=nodes, ranks=ranks, nic_gb_s=one.nic_gb_s,
            fabric=one.fabric,
        )
        for one in networks
    )
    return replace(main, otherwise=tuple(others))


def network_words(record: Record) -> str:
    """All that the row says of links, within a node and between nodes."""
    said = (
        network_rates.without_thousands(record.text(name, ""))
        for name in ("interconnect", "intra_node", "inter_node")
    )
    return "; ".join(text for text in said if text)


def outside_node(words: str) -> str:
    """Those of the words that are not of links within a node."""
    return ", ".join(
        text
        for text in re.split(r"[;,]", words)
        if not re.search("NVLINK|NVSWITCH|PCIE", text.upper())
    )


def _ranks(record: Record, assumed: Assumed) -> int:
    if record.text("n_gpus", "") or not record.text("dp", ""):
        return record.size("n_gpus")
    assumed.add("as many GPUs as dp says, for the row does not count them")
    return record.size("dp")


def _nodes(record: Record, ranks: int, assumed: Assumed) -> int:
    per_node = record.size("gpus_per_node", NODE)
    if per_node != NODE and (ranks > per_node or ranks > NODE):
        raise RowError(f"gpus_per_node: expected nodes of {NODE}, found {per_node}")
    if per_node != NODE:
        assumed.add(f"a node of {per_node} GPUs as part of one of {NODE}", widens=ANOTHER_FABRIC)
    nodes = -(-ranks // NODE)
    for name in ("nodes", "n_nodes", "num_nodes"):
        if record.size(name, nodes) != nodes:
            raise RowError(f"{name}: expected {nodes} nodes of {NODE} for {ranks} GPUs, found "
                           f"{record.size(name)}")
    return nodes


@cache
def _networks(part: Part) -> dict[str, tuple[Fabric, float]]:
    """Cluster presets of nodes of that part, the usual one first: kind of network, and GB/s of a
    node as NCCL counts them."""
    usual, found = load_cluster(part.cluster), {}
    for name in (part.cluster, *clusters()):
        cluster = load_cluster(name)
        same = (
            cluster.device == usual.device
            and cluster.links.fabric.bandwidth == usual.links.fabric.bandwidth
        )
        if cluster.nccl is not None and cluster.devices_per_node == NODE and same:
            found[name] = (
                cluster.nccl.fabric, cluster.links.rail.bandwidth * cluster.nics_per_node / 1e9,
            )
    return found


def _networks_of(
    record: Record, part: Part, words: str, nodes: int, assumed: Assumed
) -> list[Network]:
    """The network as the row says it, and behind it what its words may mean as well.

    The part's usual preset where the row says nothing or has a single node, which uses no network.
    """
    words = re.sub(
        r"\bTCP\s*/\s*IP\b", "TCP", words, flags=re.IGNORECASE
    )  # whose rate it is, its slash does not say
    outside = outside_node(words)
    column = record.text("inter_node_gbps_per_node", "")
    fabrics = _fabrics(outside)
    rates = (
        (record.positive("inter_node_gbps_per_node") / 8,)
        if column
        else _rates(outside, part, assumed if nodes > 1 else Assumed())
    )
    if nodes == 1:
        return [_one_node(part, fabrics[0], rates[0] if rates else None)]
    if not rates:
        usual = _placed(part, fabrics[0], None, assumed)
        return [usual, *(Network(preset=name) for name in _networks(part) if name != usual.preset)]
    readings = [(fabric, rate) for rate in rates for fabric in fabrics]
    if len(readings) > 1:
        of = {fabric: "" if fabric == "unknown" else f" of {fabric}" for fabric in fabrics}
        others = ", or ".join(f"{8 * rate:.0f} Gbit/s{of[fabric]}" for fabric, rate in readings[1:])
        assumed.add(f"{8 * rates[0]:.0f} Gbit/s a node{of[fabrics[0]]}; the band covers {others}, "
                    f"which its words may mean as well")
    main = _placed(part, *readings[0], assumed)
    return [main, *_also(part, readings[1:])]


def _also(part: Part, readings: list[tuple[Fabric, float]]) -> Iterator[Network]:
    """The networks of further readings, but not of one that no preset can be."""
    for fabric, rate in readings:
        with suppress(RowError):
            yield _placed(part, fabric, rate, Assumed())


def _fabrics(outside: str) -> tuple[Fabric, ...]:
    """What kinds of network the words may mean, the likeliest first: Ethernet of which nobody says
    RDMA is TCP, or RoCE."""
    if hardware_words.is_ethernet(outside):
        return ("tcp", "roce")
    return (hardware_words.fabric(outside),)


def _rates(outside: str, part: Part, assumed: Assumed) -> tuple[float, ...]:
    """GB/s of a node that the words may mean, the likeliest first; none where they say none.

    A rate that is nobody's is that of each GPU's NIC if its slot carries it, of Ethernet that of
    the node's only one.
    """
    said = _rate(outside, part)
    if said is None:
        return ()
    for words in said.assumed:
        assumed.add(words, widens=ANOTHER_FABRIC)
    if said.instead is not None:
        return (said.gb_s, said.instead)
    bare = network_rates.node_gb_s(outside, per_node=1, most=0.0)
    if _SAYS_WHOSE.search(outside) or bare is None:
        return (said.gb_s,)
    most = _most(part)
    if bare > 2 * most:
        return (said.gb_s,)
    each = NODE * min(bare, most)
    return (bare, each) if hardware_words.is_plain(outside) or said.gb_s == bare else (each, bare)


def _one_node(part: Part, fabric: Fabric, rate: float | None) -> Network:
    networks = _networks(part)
    near = [name for name in networks if rate is None or _agrees(networks[name][1], rate)]
    return Network(
        preset=([name for name in near if networks[name][0] == fabric] or near or [part.cluster])[0]
    )


def _agrees(carried: float, rate: float) -> bool:
    return abs(_sold(carried) / rate - 1) <= RATES_AGREE


def _placed(part: Part, fabric: Fabric, rate: float | None, assumed: Assumed) -> Network:
    """The preset of the part whose network is nearest to `fabric` at `rate`, with what it has
    otherwise; RowError for a faster one."""
    networks = _networks(part)
    near = [name for name in networks if rate is None or _agrees(networks[name][1], rate)]
    wider = [
        name
        for name in networks
        if rate is not None and name not in near and _sold(networks[name][1]) > rate
    ]
    alike = [name for name in (*near, *wider) if networks[name][0] == fabric]
    chosen = next(iter((*alike, *near, *wider)), "")
    if not chosen:
        have = ", ".join(
            dict.fromkeys(
                f"{8 * _sold(gb_s):.0f} Gbit/s of {kind}" for kind, gb_s in networks.values()
            )
        )
        raise RowError(f"network: expected at most one of a preset of {part.words}, {have} a "
                       f"node, found {8 * (rate or 0):.0f} Gbit/s")
    kind, carried = networks[chosen]
    if rate is None:
        assumed.add(
            f"{8 * _sold(carried):.0f} Gbit/s of network a node, as {chosen} has", widens=UNSAID
        )
    if fabric == "unknown":
        assumed.add(
            f"{kind}, as {chosen} has, for the row does not name its kind of network",
            widens=ANOTHER_FABRIC,
        )
    elif fabric != kind:
        assumed.add(f"{fabric} in place of the {kind} of {chosen}", widens=ANOTHER_FABRIC)
    foreign = "" if fabric in ("unknown", kind) else fabric
    if chosen in near or rate is None:
        return Network(preset=chosen, fabric=foreign)
    assumed.add(f"{8 * rate:.0f} Gbit/s a node as slower links of {chosen}", widens=ANOTHER_FABRIC)
    return Network(
        preset=chosen, nic_gb_s=AS_SOLD * rate / load_cluster(chosen).nics_per_node, fabric=foreign
    )


def _sold(gb_s: float) -> float:
    return gb_s / AS_SOLD


def _rate(outside: str, part: Part) -> network_rates.Taken | None:
    return network_rates.taken(outside, per_node=NODE, most=_most(part))


def _most(part: Part) -> float:
    """GB/s that a GPU's slot carries, as they are sold."""
    nccl = load_cluster(part.cluster).nccl
    return _sold(PCIE_GB_S[nccl.generation]) if nccl else 50.0
