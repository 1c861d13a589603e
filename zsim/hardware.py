"""Clusters: devices, links and nodes from preset files, each number with its source, and the graph they form.

The bandwidths of links are what NCCL reaches on them, never data-sheet NVLink. A ClusterSpec is small whatever the
number of nodes; its graph is built only when somebody asks for it. It knows no strategy and no collective.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from zsim.devices import Device, Figure, figures_of, load_device, values
from zsim.errors import ScenarioError

if TYPE_CHECKING:
    import networkx

@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An edge: bytes/s in each direction, and nanoseconds of latency."""

    bandwidth: int
    latency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The kinds of edge: `fabric` from device to the node's switch, `pcie` from device or NIC to PCIe switch, `host`
    from PCIe switch to host memory, `rail` from NIC to rail switch."""

    fabric: Link
    pcie: Link
    host: Link
    rail: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Nanoseconds to start a collective, and for the host to issue a kernel or a collective."""

    collective: int
    issue_kernel: int
    issue_collective: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A ring over some ranks: mean latency of its hops, rounded up, and bytes/s of its narrowest hop."""

    alpha_ns: int
    bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`num_nodes` nodes of one preset, and how many of their devices have a rank (packed into nodes, in rank order)."""

    name: str
    description: str
    kind: Literal["cpu", "cuda"]
    collectives: str
    """The library of collectives: a name in `zsim.collectives.ALGORITHMS`."""
    devices_per_node: int
    nics_per_node: int
    num_nodes: int
    num_ranks: int
    device: Device
    links: Links
    host_memory_bandwidth: int
    """Bytes/s that a node's processors reach to their memory, together."""
    overheads: Overheads
    figures: tuple[Figure, ...] = field(repr=False)

    @property
    def host_bandwidth(self) -> int:
        """Bytes/s of host memory for one rank, when all ranks of its node use it at once."""
        return self.host_memory_bandwidth // self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node that `rank` runs on."""
        return rank // self.devices_per_node

    def path(self, ranks: tuple[int, ...]) -> Path:
        """The ring over `ranks` in their order, all members of a node next to one another.

        In a node each rank has the fabric for itself. A ring that leaves the node runs as one channel per NIC, rail by
        rail; its members bring their own share of the node's NICs, since the node's other ranks form like groups that
        use theirs at the same time.
        """
        per_node: dict[int, int] = {}
        for rank in ranks:
            per_node[self.node_of(rank)] = per_node.get(self.node_of(rank), 0) + 1
        inside = 2 * self.links.fabric.latency
        if len(per_node) <= 1:
            return Path(alpha_ns=inside, bytes_per_s=self.links.fabric.bandwidth)
        outside = 2 * (2 * self.links.pcie.latency + self.links.rail.latency)
        hops = len(ranks)
        alpha = -(-((hops - len(per_node)) * inside + len(per_node) * outside) // hops)
        nic = min(self.links.pcie.bandwidth, self.links.rail.bandwidth)
        rails = min(per_node.values()) * nic * self.nics_per_node // self.devices_per_node
        widest = min(rails, self.links.fabric.bandwidth) if max(per_node.values()) > 1 else rails
        return Path(alpha_ns=alpha, bytes_per_s=widest)

    def graph(self) -> networkx.Graph:
        """The cluster; nodes have `kind` (gpu, switch, pcie, nic, rail, host), edges `bandwidth` and `latency_ns`."""
        return _graph(self)


def clusters() -> tuple[str, ...]:
    """The names of all cluster presets, sorted."""
    folder = files("zsim") / "presets" / "clusters"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_cluster(name: str, *, nodes: int = 1, ranks: int | None = None) -> ClusterSpec:
    """`nodes` nodes of the preset `name`, with a rank on each device or on the first `ranks` of them.

    A CPU host has as many devices as it has ranks. ScenarioError for an unknown name or for more ranks than devices.
    """
    if name not in clusters():
        near = difflib.get_close_matches(name, clusters(), n=1)
        hint = f", did you mean {near[0]}?" if near else "; `zsim list clusters` names them"
        raise ScenarioError((f'cluster.preset: unknown cluster "{name[:60]}"{hint}',))
    table = _preset(name)
    per_node = int(table["devices_per_node"])
    if table["kind"] == "cpu":
        per_node = -(-(ranks or nodes) // nodes)
    num_ranks = nodes * per_node if ranks is None else ranks
    if not 1 <= num_ranks <= nodes * per_node:
        raise ScenarioError(
            (f"cluster.ranks: expected 1 to {nodes * per_node}, the devices of {nodes} × {name}, found {num_ranks}",)
        )
    device = load_device(table["device"])
    return ClusterSpec(
        name=name,
        description=table["description"],
        kind=table["kind"],
        collectives=table["collectives"],
        devices_per_node=per_node,
        nics_per_node=table["nics_per_node"],
        num_nodes=nodes,
        num_ranks=num_ranks,
        device=device,
        links=Links(**{kind: Link(**values(link)) for kind, link in table["links"].items()}),
        host_memory_bandwidth=values(table["host"])["memory_bandwidth"],
        overheads=Overheads(**values(table["overheads"])),
        figures=(*device.figures, *figures_of("", table)),
    )


@cache
def _preset(name: str) -> dict[str, Any]:
    return tomllib.loads((files("zsim") / "presets" / "clusters" / f"{name}.toml").read_text())


def _graph(cluster: ClusterSpec) -> networkx.Graph:
    import networkx  # 60 ms, and only those who look at the graph need it

    graph = networkx.Graph()
    for node in range(cluster.num_nodes):
        _add_node(graph, cluster, node)
    return graph


def _add_node(graph: networkx.Graph, cluster: ClusterSpec, node: int) -> None:
    """One node: each device on the fabric and behind its NIC's PCIe switch, each NIC on the switch of its rail."""
    links, num_switches = cluster.links, max(1, cluster.nics_per_node)

    def join(kind_a: str, a: str, kind_b: str, b: str, link: Link) -> None:
        graph.add_node(a, kind=kind_a)
        graph.add_node(b, kind=kind_b)
        graph.add_edge(a, b, bandwidth=link.bandwidth, latency_ns=link.latency)

    for index in range(cluster.devices_per_node):
        device = f"node{node}.gpu{index}"
        pcie = f"node{node}.pcie{index * num_switches // cluster.devices_per_node}"
        join("gpu", device, "switch", f"node{node}.switch", links.fabric)
        join("gpu", device, "pcie", pcie, links.pcie)
        join("pcie", pcie, "host", f"node{node}.host", links.host)
    for index in range(cluster.nics_per_node):
        nic = f"node{node}.nic{index}"
        join("pcie", f"node{node}.pcie{index}", "nic", nic, links.pcie)
        join("nic", nic, "rail", f"rail{index}", links.rail)
