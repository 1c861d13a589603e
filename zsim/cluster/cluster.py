"""Cluster: nodes of devices and links, and the path of a ring over some of its ranks.

A ClusterSpec is small whatever the number of nodes; `zsim.cluster.routes` builds its graph on
demand. It knows no strategy and no collective.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from zsim.cluster import nic_sharing
from zsim.cluster.devices import Device, PresetFigure
from zsim.cluster.host import Drives, FileSystem, Host
from zsim.cluster.links import Links, MeasuredCurve, Nccl, Overheads, SlowRail
from zsim.cluster.measured_times import MeasuredTimes


class Path(NamedTuple):
    """A ring over some ranks: mean latency of its hops, rounded up, bytes/s of its narrowest hop,
    and the ranks of its fullest node.

    The NICs of the narrowest node carry `network_bytes_per_s`, which a ring may not need; 0 inside
    a node.
    """

    alpha_ns: int
    bytes_per_s: int
    num_ranks: int
    num_nodes: int
    fullest: int
    network_bytes_per_s: int = 0

    @property
    def pairs_bytes_per_s(self) -> int:
        """Bytes/s of each rank that sends to all others at once, rounded down. A node's NICs carry
        what each of its ranks has for each rank of another node."""
        if self.num_nodes <= 1:
            return self.bytes_per_s
        crossing = self.fullest * (self.num_ranks - self.fullest)
        return max(1, min(
            self.bytes_per_s, self.network_bytes_per_s * (self.num_ranks - 1) // crossing
        ))


Layout = range | tuple[int, ...]
"""Groups of ranks of equal layout have equal paths; see `ClusterSpec.layout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`num_nodes` nodes of one preset, and how many of their devices have a rank (packed into
    nodes, in rank order)."""

    name: str
    description: str
    kind: Literal["cpu", "cuda"]
    collectives: str
    """The library of collectives: a name in `zsim.cluster.collectives.LIBRARIES`."""
    devices_per_node: int
    nics_per_node: int
    num_nodes: int
    num_ranks: int
    device: Device
    links: Links
    host_memory_bandwidth: int
    """Bytes/s that a node's processors reach to their memory, together."""
    overheads: Overheads
    figures: tuple[PresetFigure, ...] = field(repr=False)
    host: Host = field(default_factory=Host)
    drives: Drives | None = None
    """The drives of a node; None where its file names none."""
    file_system: FileSystem | None = None
    """The file system of all ranks; None where its file names none."""
    nccl: Nccl | None = None
    curves: tuple[MeasuredCurve, ...] = ()
    """Collectives that were measured here; none in a preset."""
    slow_rails: tuple[SlowRail, ...] = ()
    """Links that are slower than the preset's; none in a preset."""
    lost_rails: tuple[tuple[int, int], ...] = ()
    """Links that carry nothing, each as node and NIC; none in a preset."""
    times: tuple[MeasuredTimes, ...] = ()
    """Times of collectives that were measured here size by size; none in a preset."""
    has_idle_cores: bool = False
    """Compute takes no core from collectives, as emulated compute does not. The executor then has
    them go on beside it."""

    @property
    def with_idle_cores(self) -> ClusterSpec:
        """The cluster with idle cores: collectives neither wait for one nor slow kernels down."""
        return replace(
            self, has_idle_cores=True, device=replace(self.device, interference=0.0),
            overheads=replace(self.overheads, wake=0),
        )

    def node_of(self, rank: int) -> int:
        """The node that `rank` runs on."""
        return rank // self.devices_per_node

    def layout(self, ranks: tuple[int, ...]) -> Layout:
        """A key with which `path` is equal: for evenly spaced ranks, the like ranks that begin in
        the first node; for others, the ranks themselves.

        A group inside one node is alike wherever it begins; a slow rail makes every node its own.
        With shared NICs, so does a last node that is not full, and alike groups have alike
        neighbours.
        """
        group = nic_sharing.even(ranks)
        if not group:
            return ranks
        if self.slow_rails or self.lost_rails:
            return group
        size, begin = self.devices_per_node, 0
        if self.node_of(ranks[0]) != self.node_of(ranks[-1]):
            own_nics = self.nics_per_node >= size
            if (
                not own_nics
                and self.num_ranks % size
                and self.node_of(ranks[-1]) == self.node_of(self.num_ranks - 1)
            ):
                return group
            begin = ranks[0] % (size if own_nics else nic_sharing.period(group, per_node=size))
        return range(begin, begin + group.step * len(ranks), group.step)

    @property
    def hop_ns(self) -> tuple[int, int]:
        """Nanoseconds from one device to the next inside a node, and to one in another node."""
        links = self.links
        to_nic = links.pcie.latency + (links.fabric if self.shares_pcie else links.pcie).latency
        return 2 * links.fabric.latency, 2 * (to_nic + links.rail.latency)

    @property
    def shares_pcie(self) -> bool:
        """True where a device's one link carries both its rings in the node and what it sends over
        a NIC."""
        return self.nccl is not None and self.nccl.links == "pcie"

    def path(self, ranks: tuple[int, ...]) -> Path:
        """The ring over `ranks` in their order, all members of a node next to one another.

        In a node each rank has the fabric for itself. A ring that leaves the node runs over the
        NICs of its members. Ranks that send over one NIC at the same time have equal parts of it
        (`zsim.cluster.nic_sharing`). The node with the least bandwidth of NICs limits the ring.
        Channels get equal parts of a message, so the slowest rail of a node holds all of its rails
        up.
        """
        per_node = Counter(map(self.node_of, ranks))
        inside, outside = self.hop_ns
        if len(per_node) <= 1:
            width = self.links.fabric.bandwidth
            return Path(
                alpha_ns=inside, bytes_per_s=width, num_ranks=len(ranks), num_nodes=len(per_node),
                fullest=len(ranks),
            )
        hops, fullest = len(ranks), max(per_node.values())
        alpha = -(-((hops - len(per_node)) * inside + len(per_node) * outside) // hops)
        narrowest = min(self.nic_rates(ranks).values())
        needs_fabric = fullest > 1 or self.shares_pcie
        widest = min(narrowest, self.links.fabric.bandwidth) if needs_fabric else narrowest
        return Path(
            alpha_ns=alpha, bytes_per_s=widest, num_ranks=hops, num_nodes=len(per_node),
            fullest=fullest, network_bytes_per_s=narrowest,
        )

    def usage(self, ranks: tuple[int, ...]) -> dict[int, dict[str, Fraction]]:
        """Shares of links that a ring over `ranks` takes at full speed, by rank. They are those of
        its `fabric` link and of its part of the `rail`s, as in `path`.

        The ring is as wide in every node, so that a node with more members than another takes less
        of the rails of each. A group of one rank uses nothing. A rank alone in its node uses the
        fabric only on the way to its NIC.
        """
        if len(ranks) < 2:
            return {}
        path, per_node = self.path(ranks), Counter(map(self.node_of, ranks))
        fabric = Fraction(path.bytes_per_s, self.links.fabric.bandwidth)
        inside = {"fabric": fabric}
        if path.num_nodes <= 1:
            return dict.fromkeys(ranks, inside)
        nodes = {
            node: (inside if per_node[node] > 1 or self.shares_pcie else {})
            | {"rail": path.bytes_per_s / (nics * self._nic)}
            for node, nics in self._nics(ranks).items()
        }
        shares = {rank: nodes[self.node_of(rank)] for rank in ranks}
        for rank in ranks if self.slow_rails else ():
            rail = shares[rank]["rail"] * self._nic / self._slowest((rank,))[self.node_of(rank)]
            shares[rank] = shares[rank] | {
                "rail": rail
            }  # at most 1, for the ring is as slow as the slowest of its node
        return shares

    def nic_rates(self, ranks: tuple[int, ...]) -> dict[int, int]:
        """Bytes/s that a ring over `ranks` has over its NICs in each node, if it leaves the node.
        """
        slowest = self._slowest(ranks)
        return {node: int(nics * slowest[node]) for node, nics in self._nics(ranks).items()}

    @property
    def _nic(self) -> int:
        """Bytes/s of a NIC."""
        return min(self.links.pcie.bandwidth, self.links.rail.bandwidth)

    def _nics(self, ranks: tuple[int, ...]) -> dict[int, Fraction]:
        """The number of NICs that a ring over `ranks` has in each node, if it leaves the node."""
        return nic_sharing.nics_of_ring(
            ranks, num_ranks=self.num_ranks, per_node=self.devices_per_node, nics=self.nics_per_node
        )

    def nics_of(self, rank: int) -> range:
        """The NICs of its node next to `rank`'s device: its part, as even as can be, or the one
        that it shares."""
        nics, size, index = self.nics_per_node, self.devices_per_node, rank % self.devices_per_node
        if nics < size:
            return range(index * nics // size, index * nics // size + 1)
        return range(-(-index * nics // size), -(-(index + 1) * nics // size))

    def cut_by(self, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The lost links that a ring over `ranks` needs, each as node and NIC."""
        return tuple(
            (node, nic) for node, nic in self.lost_rails if self.needs(ranks, node=node, nic=nic)
        )

    def needs(self, ranks: tuple[int, ...], *, node: int, nic: int) -> bool:
        """True where a ring over `ranks` goes over the link of that NIC."""
        across = len(set(map(self.node_of, ranks))) > 1
        return across and not self.ranks_at(node, nic).isdisjoint(ranks)

    def ranks_at(self, node: int, nic: int) -> frozenset[int]:
        """The ranks of a node that send over that NIC."""
        first = node * self.devices_per_node
        ranks = range(first, min(first + self.devices_per_node, self.num_ranks))
        return frozenset(rank for rank in ranks if nic in self.nics_of(rank))

    def _slowest(self, ranks: tuple[int, ...]) -> dict[int, int]:
        """Bytes/s of the slowest NIC that a ring over `ranks` uses in each node."""
        slowest = dict.fromkeys(map(self.node_of, ranks), self._nic)
        if self.slow_rails:
            slow = {(rail.node, rail.nic): rail.bandwidth for rail in self.slow_rails}
            for rank in ranks:
                node = self.node_of(rank)
                slowest[node] = min(
                    slowest[node],
                    *(slow.get((node, nic), slowest[node]) for nic in self.nics_of(rank)),
                )
        return slowest
