"""Routes between neighbours of a mesh's groups: the links that a hop takes, and the narrowest.

They are shortest paths on the cluster as a networkx graph. The engine's `ClusterSpec.path` has
hops on one rail as long and as wide in closed form, and shares NICs. This module knows no Program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx

from zsim.cluster.cluster import ClusterSpec
from zsim.ir.mesh import Mesh

PREFERENCE: dict[str, int] = {"fabric": 1, "pcie": 10, "host": 100, "rail": 1000}
"""Costs of links: a ring takes NVLink before PCIe before the network, however wide they are."""
MOST_DEVICES = 512
"""The most devices of a node that a way may begin, end or pass at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from a device to its neighbour: its parts, the kind of its narrowest link, bytes/s
    of that, and nanoseconds."""

    parts: tuple[str, ...]
    narrowest: str
    bytes_per_s: int
    latency_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRoutes:
    """The hops of the slowest group of that name, inside a node and between nodes, and bytes/s of
    a ring over it."""

    group: str
    num_ranks: int
    hops: tuple[Route, ...]
    ring_bytes_per_s: int


def routes(cluster: ClusterSpec, mesh: Mesh, groups: Iterable[str]) -> tuple[GroupRoutes, ...]:
    """The routes of groups by name."""
    return tuple(_routes(cluster, mesh, name) for name in groups)


def _routes(cluster: ClusterSpec, mesh: Mesh, name: str) -> GroupRoutes:
    alike = {cluster.layout(ranks): ranks for ranks in reversed(mesh.groups(name))}
    paths = {ranks: cluster.path(ranks) for ranks in alike.values()}
    ranks = min(sorted(paths), key=lambda ranks: (paths[ranks].bytes_per_s, -paths[ranks].alpha_ns))
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(cluster.node_of(rank), []).append(rank)
    within = next((own[:2] for own in members.values() if len(own) > 1), [])
    inside = [_route(cluster, within[:1], within[1:])] if within else []
    slow = {rail.node for rail in cluster.slow_rails}
    nodes = list(members)
    between = [
        _route(cluster, members[here], members[there])
        for here, there in pairwise(nodes)
        if here == nodes[0] or slow & {here, there}
    ]
    narrowest = [min(between, key=lambda route: route.bytes_per_s)] if between else []
    return GroupRoutes(
        group=name, num_ranks=len(ranks), hops=(*inside, *narrowest),
        ring_bytes_per_s=paths[ranks].bytes_per_s,
    )


def _route(cluster: ClusterSpec, sources: list[int], targets: list[int]) -> Route:
    """The shortest route from one of `sources` to one of `targets`, each all in one node."""
    sources, targets = sources[:MOST_DEVICES], targets[:MOST_DEVICES]
    firsts = [ranks[0] - ranks[0] % cluster.devices_per_node for ranks in (sources, targets)]
    passed = range(min(cluster.devices_per_node, MOST_DEVICES))
    around = (first + index for first in firsts for index in passed)
    part = graph(cluster, devices=dict.fromkeys((*sources, *targets, *around)))
    lengths, ways = networkx.multi_source_dijkstra(
        part, [device_name(cluster, rank) for rank in sources]
    )
    nearest = min((device_name(cluster, rank) for rank in targets), key=lengths.__getitem__)
    links = links_of(part, ways[nearest])
    narrow = narrowest(links)
    return Route(
        parts=tuple(ways[nearest]), narrowest=narrow["link"], bytes_per_s=narrow["bandwidth"],
        latency_ns=sum(link["latency_ns"] for link in links),
    )


def links_of(part: networkx.Graph, way: Sequence[str]) -> list[Mapping[str, Any]]:
    """The links of `way`, as `graph` has them."""
    return [part.edges[pair] for pair in pairwise(way)]


def narrowest(links: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The narrowest of `links`; of several that farthest from the device."""
    return min(links, key=lambda link: (link["bandwidth"], -PREFERENCE[link["link"]]))


def device_name(cluster: ClusterSpec, number: int) -> str:
    """The name of a device in the graph."""
    node, index = divmod(number, cluster.devices_per_node)
    return f"node{node}.{'gpu' if cluster.kind == 'cuda' else 'cpu'}{index}"


def graph(cluster: ClusterSpec, devices: Iterable[int] | None = None) -> networkx.Graph:
    """The cluster, or the nodes of some `devices` of it with no other device.

    Edges have `link` (fabric, pcie, host, rail), `bandwidth`, `latency_ns` and `weight`. The weight
    is that of PREFERENCE, and of like links it is least for a slow one, which holds a ring up.
    """
    parts = networkx.Graph()
    whole = range(cluster.num_nodes * cluster.devices_per_node)
    for source, target, link, bandwidth in _links(cluster, whole if devices is None else devices):
        usual = getattr(cluster.links, link)
        parts.add_edge(
            source, target, link=link, bandwidth=bandwidth or usual.bandwidth,
            latency_ns=usual.latency,
            weight=PREFERENCE[link] - (1 - bandwidth / usual.bandwidth if bandwidth else 0) / 2,
        )
    return parts


def _links(cluster: ClusterSpec, devices: Iterable[int]) -> Iterator[tuple[str, str, str, int]]:
    """Both ends of each link, its kind, and bytes/s of a slow one. A device is on the fabric and
    behind its NIC's PCIe switch, a NIC on the switch of its rail. Without NVLink the fabric is the
    device's one way to that switch."""
    per_node, nics = cluster.devices_per_node, cluster.nics_per_node
    num_switches, nodes = max(1, min(nics, per_node)), dict[str, int]()
    for number in devices:
        node, index = divmod(number, per_node)
        name, pcie = f"node{node}", f"node{node}.pcie{index * num_switches // per_node}"
        nodes[name] = node
        if cluster.shares_pcie:
            yield device_name(cluster, number), pcie, "fabric", 0
        else:
            yield device_name(cluster, number), f"{name}.switch", "fabric", 0
            yield device_name(cluster, number), pcie, "pcie", 0
        yield pcie, f"{name}.host", "host", 0
    usual = cluster.links.rail.bandwidth
    slow = {(rail.node, rail.nic): min(rail.bandwidth, usual) for rail in cluster.slow_rails}
    for name, node in nodes.items():
        for nic in range(nics):
            yield f"{name}.pcie{nic * num_switches // nics}", f"{name}.nic{nic}", "pcie", 0
            yield f"{name}.nic{nic}", f"rail{nic}", "rail", slow.get((node, nic), 0)
