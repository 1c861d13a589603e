"""Which cluster preset a row ran on: the GPU's part, how many make a node, and what its network carries.

Presets have nodes of eight. A network between those that presets of the part have is one of them with slower links, a faster one is
refused by name; where a row of several nodes says nothing of it, the preset's is assumed, and the band wider.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from zsim.collectives.nccl_search import PCIE_GB_S
from zsim.devices import load_device
from zsim.hardware import Fabric, clusters, load_cluster
from zsim.measurements import congestion, nccl_text
from zsim.measurements.checks import Assumed
from zsim.measurements.gpus import Part, is_sized, part_of
from zsim.measurements.table import Record, RowError

NODE = 8
_SAYS_WHOSE = re.compile(r"/|\bper\b|\d\s*[x×*]|[x×*]\s*\d|node|gpu|nic|host|server|instance|HDR|NDR|EDR|XDR", re.IGNORECASE)
"""Words that say whose a rate is: a node's or a NIC's."""
RATES_AGREE = 0.1
AS_SOLD = 0.96
"""NCCL counts 12 GB/s of a NIC of 100 Gbit/s, which is sold as 12.5."""
ANOTHER_FABRIC, UNSAID = 0.05, 0.1
"""How much wider a band is for a network of another kind with the same rate, and for one of which the row says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs of a row: their part, the preset of their nodes, how many nodes and ranks.

    `nic_gb_s` is what each NIC's link carries for this job where that is less than the preset's, else 0.
    """

    part: Part
    preset: str
    nodes: int
    ranks: int
    nic_gb_s: float = 0.0

    @property
    def table(self) -> dict[str, object]:
        """The scenario's table. A ring is as fast as its slowest link, so one node's links make the whole network slower."""
        found: dict[str, object] = {"preset": self.preset, "nodes": self.nodes, "ranks": self.ranks}
        if self.nic_gb_s:
            rate = f"{self.nic_gb_s:.6g} GB/s"
            nics = range(load_cluster(self.preset).nics_per_node)
            found["slow_links"] = [{"node": 0, "nic": nic, "bandwidth": rate} for nic in nics]
        return found


def among_others(place: Machine) -> Machine:
    """`place` with what is left of its network where others use it as well; as it is where a single node uses none."""
    if place.nodes == 1:
        return place
    whole = place.nic_gb_s or load_cluster(place.preset).links.rail.bandwidth / 1e9
    return replace(place, nic_gb_s=whole * congestion.bandwidth_left(place.nodes))


def machine(record: Record, assumed: Assumed) -> Machine:
    """What the row's columns say of its machine; RowError where no preset is like it."""
    gpu, ranks = record.text("gpu"), record.size("n_gpus")
    part = part_of(gpu)
    if not is_sized(gpu):
        assumed.add(f"an {part.words}")
    nodes = _nodes(record, ranks, assumed)
    words = "; ".join(text for text in (record.text(name, "") for name in ("interconnect", "intra_node", "inter_node")) if text)
    joined = re.search(r"NVLINK|NVSWITCH", re.sub(r"\b(NO|WITHOUT|NOT)\s+NV(LINK|SWITCH)", "", words.upper()))
    if part.form == "SXM" and re.search(r"\bPCI-?E?\b", words.upper()) and not joined:
        raise RowError(f"interconnect: expected GPUs joined by NVLink, found {words[:60]!r}")
    inside = record.text("intra_node", "").upper()
    if inside and part.form == "SXM" and not re.search("NVLINK|NVSWITCH|SXM|HGX|DGX", inside):
        assumed.add("NVLink between the GPUs of a node", widens=UNSAID)
    preset, slower = _network(record, part, words, nodes, assumed)
    return Machine(part=part, preset=preset, nodes=nodes, ranks=ranks, nic_gb_s=slower)


def _nodes(record: Record, ranks: int, assumed: Assumed) -> int:
    per_node = record.size("gpus_per_node", NODE)
    if per_node != NODE and (ranks > per_node or ranks > NODE):
        raise RowError(f"gpus_per_node: expected nodes of {NODE}, found {per_node}")
    if per_node != NODE:
        assumed.add(f"a node of {per_node} GPUs as part of one of {NODE}", widens=ANOTHER_FABRIC)
    nodes = -(-ranks // NODE)
    for name in ("nodes", "n_nodes", "num_nodes"):
        if record.size(name, nodes) != nodes:
            raise RowError(f"{name}: expected {nodes} nodes of {NODE} for {ranks} GPUs, found {record.size(name)}")
    return nodes


@cache
def _networks(device: str) -> dict[str, tuple[Fabric, float]]:
    """Cluster presets of nodes of that device: kind of network, and GB/s of a node as NCCL counts them."""
    found = {}
    for name in clusters():
        cluster = load_cluster(name)
        if cluster.nccl is not None and cluster.devices_per_node == NODE and cluster.device == load_device(device):
            found[name] = cluster.nccl.fabric, cluster.links.rail.bandwidth * cluster.nics_per_node / 1e9
    return found


def _network(record: Record, part: Part, words: str, nodes: int, assumed: Assumed) -> tuple[str, float]:
    """The preset whose network is as the row says, and GB/s of each NIC where its links are slower than the preset's, else 0.

    The part's usual preset where the row says nothing or has a single node, which uses no network.
    """
    outside = ", ".join(text for text in re.split(r"[;,]", words) if not re.search("NVLINK|NVSWITCH|PCIE", text.upper()))
    fabric = nccl_text.fabric(outside)
    rate = record.positive("inter_node_gbps_per_node") / 8 if record.text("inter_node_gbps_per_node", "") else _rate(outside, part)
    if rate is not None and nodes > 1 and not record.text("inter_node_gbps_per_node", "") and not _SAYS_WHOSE.search(outside):
        assumed.add(f"{8 * rate:.0f} Gbit/s a node: so many NICs of what is said as it has GPUs, or one for all")
    networks = _networks(part.device)
    names = [part.cluster, *(name for name in networks if name != part.cluster)]
    near = [name for name in names if rate is None or abs(_sold(networks[name][1]) / rate - 1) <= RATES_AGREE]
    alike = [name for name in near if networks[name][0] == fabric]
    if nodes == 1:
        return (alike or near or [part.cluster])[0], 0.0
    wider = [name for name in names if rate is not None and name not in near and _sold(networks[name][1]) > rate]
    wider_alike = [name for name in wider if networks[name][0] == fabric]
    chosen = next(iter((*alike, *wider_alike, *near, *wider)), "")
    if not chosen or (fabric == "tcp" and networks[chosen][0] != fabric):
        have = ", ".join(dict.fromkeys(f"{8 * _sold(gb_s):.0f} Gbit/s of {kind}" for kind, gb_s in networks.values()))
        found = f"{8 * rate:.0f} Gbit/s" if rate is not None and fabric != "tcp" else fabric
        raise RowError(f"network: expected at most one of a preset of {part.words}, {have} a node, found {found}")
    kind, carried = networks[chosen]
    if rate is None:
        assumed.add(f"{8 * _sold(carried):.0f} Gbit/s of network a node, as {chosen} has", widens=UNSAID)
    if fabric not in ("unknown", kind):
        assumed.add(f"{fabric} as the {kind} of {chosen}", widens=ANOTHER_FABRIC)
    if chosen in near or rate is None:
        return chosen, 0.0
    assumed.add(f"{8 * rate:.0f} Gbit/s a node as slower links of {chosen}", widens=ANOTHER_FABRIC)
    return chosen, AS_SOLD * rate / load_cluster(chosen).nics_per_node


def _sold(gb_s: float) -> float:
    return gb_s / AS_SOLD


def _rate(outside: str, part: Part) -> float | None:
    nccl = load_cluster(part.cluster).nccl
    most = _sold(PCIE_GB_S[nccl.generation]) if nccl else 50.0
    return nccl_text.node_gb_s(outside, per_node=NODE, most=most)
