"""The hops of a ring over some ranks: the links that networkx's routes give, and how much of each a
ring takes.

A hop inside a node goes from device to device over the fabric. A hop between nodes goes over every
NIC of the node's members at once, with an equal part of each chunk over each. For NCCL lays a ring
through each NIC, and each of these leaves the node at another member. It enters the next node on
the same rail, from where it may go on over the fabric. Bandwidths are those of `ClusterSpec.path`,
so that the narrowest hop is as wide as the ring. This module knows no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import networkx

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.routes import device_name, graph, links_of, narrowest

DirectedLink = tuple[str, str]
"""A link in one direction, by the names of the parts at its ends."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A link on the way of a hop.

    A `part` of each chunk goes over it, for which it needs a `share` of its bandwidth, at most 1,
    at the hop's own rate.
    """

    link: DirectedLink
    part: Fraction
    share: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The way from a rank to the next of its ring.

    It has the bytes/s of a chunk alone on it, the kind of its narrowest link, and all its links.
    """

    source: int
    destination: int
    bytes_per_s: int
    narrowest: str
    uses: tuple[LinkUse, ...]


def hops(cluster: ClusterSpec, ranks: tuple[int, ...]) -> tuple[Hop, ...]:
    """The hops of the ring over `ranks` in their order, the last of them back to the first rank.

    >>> from zsim.cluster.cluster_presets import load_cluster
    >>> first, *_, last = hops(load_cluster("p4d", nodes=2), tuple(range(16)))
    >>> [use.link for use in first.uses]
    [('node0.gpu0', 'node0.switch'), ('node0.switch', 'node0.gpu1')]
    >>> last.source, last.destination, last.narrowest
    (15, 0, 'rail')
    >>> [use.part for use in last.uses if "rail0" in use.link]
    [Fraction(1, 4), Fraction(1, 4)]
    """
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(cluster.node_of(rank), []).append(rank)
    rates = cluster.nic_rates(ranks) if len(members) > 1 else {}
    parts: dict[tuple[int, int], networkx.Graph] = {}
    made = []
    for source, destination in pairwise((*ranks, ranks[0])):
        here, there = cluster.node_of(source), cluster.node_of(destination)
        part = parts.get((here, there)) or _nodes(cluster, here, there)
        parts[here, there] = part
        if here == there:
            rate = cluster.links.fabric.bandwidth
            ends = device_name(cluster, source), device_name(cluster, destination)
            ways = [networkx.dijkstra_path(part, *ends)]
        else:
            rate = min(rates[here], rates[there])
            ways = list(_between(cluster, part, members[here], members[there]))
        links = [link for way in ways for link in links_of(part, way)]
        made.append(
            Hop(
                source=source,
                destination=destination,
                bytes_per_s=rate,
                narrowest=narrowest(links)["link"],
                uses=tuple(_uses(part, ways, rate)),
            )
        )
    return tuple(made)


def _nodes(cluster: ClusterSpec, *nodes: int) -> networkx.Graph:
    """The graph of some nodes with all their devices."""
    size = cluster.devices_per_node
    return graph(cluster, [node * size + index for node in nodes for index in range(size)])


def _between(
    cluster: ClusterSpec, part: networkx.Graph, members: Sequence[int], others: Sequence[int]
) -> Iterator[list[str]]:
    """The way over each NIC next to one of `members`, from the nearest of them to the nearest of
    `others` in another node."""
    sources = [device_name(cluster, rank) for rank in members]
    targets = [device_name(cluster, rank) for rank in others]
    node = cluster.node_of(members[0])
    for nic in sorted({nic for rank in members for nic in cluster.nics_of(rank)}):
        name = f"node{node}.nic{nic}"
        _, out = networkx.multi_source_dijkstra(part, sources, target=name)
        lengths, ways = networkx.single_source_dijkstra(part, name)
        yield [*out, *ways[min(targets, key=lengths.__getitem__)][1:]]


def _uses(part: networkx.Graph, ways: Sequence[Sequence[str]], rate: int) -> Iterator[LinkUse]:
    """The links of `ways`, each of which has an equal part of a chunk; links of several ways have
    the sum."""
    carried: dict[DirectedLink, Fraction] = {}
    for link in _links(ways):
        carried[link] = carried.get(link, Fraction(0)) + Fraction(1, len(ways))
    for link, own in carried.items():
        share = own * rate / part.edges[link]["bandwidth"]
        yield LinkUse(link, own, min(share, Fraction(1)))


def _links(ways: Iterable[Sequence[str]]) -> Iterator[DirectedLink]:
    for way in ways:
        yield from pairwise(way)
