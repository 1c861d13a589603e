"""Device memory that NCCL keeps for a communicator at one rank, connection by connection.

Sizes and their rounding follow NCCL 2.30.7 (src/init.cc, src/transport/p2p.cc, net.cc, nvls.cc). It
knows no GPU by name: channels, and whether a receiver reads from its sender, are given.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil
from typing import NamedTuple

from zsim.cluster.cluster import ClusterSpec

KIB, MIB = 2**10, 2**20

SIMPLE, LL, LL128 = 4 * MIB, 8 * 512 * 8 * 16, 120 * 640 * 8 * 8
"""The buffer per channel and connection for each of NCCL's protocols."""
GRANULARITY = 2 * MIB
"""Device memory that NCCL shares between ranks is rounded up to this (CUDA_IPC_MIN)."""
HEADER = 4 * KIB
"""ncclSendMem or ncclRecvMem, in front of the buffers of a connection."""
NVLS_STEP = 128 * KIB * 8
"""One channel's NVLS buffer per head and direction: its largest chunk, in 8 steps."""
SHARED_NETWORK = 512 * MIB
"""Network buffers of send and receive together, as allocated in NVIDIA nccl issue 2363; they belong
to connections between nodes."""


def _shared(nbytes: int) -> int:
    return -(-nbytes // GRANULARITY) * GRANULARITY


class Wire(NamedTuple):
    """Bytes of device memory of one channel's connection, at the rank that receives and at the one
    that sends."""

    receive: int
    send: int


NETWORK = Wire(receive=_shared(SIMPLE + LL + LL128), send=_shared(SIMPLE + LL128))
"""Through the NIC with GPUDirect: all buffers of the receiver, and the sender's but for LL."""
WRITES = Wire(receive=_shared(HEADER + SIMPLE + LL + LL128), send=_shared(HEADER))
"""Inside a node: the sender writes into the receiver's buffers."""
READS = Wire(receive=_shared(HEADER + LL + LL128), send=_shared(HEADER + SIMPLE))
"""A100s on NVLink: the receiver reads the Simple buffer, which the sender has."""


class Ring(NamedTuple):
    """The layout of a communicator at one rank: its `channels` and the `nodes` that the group
    spans. The rank has a `position` among the group's `members` on its node."""

    channels: int
    members: int
    position: int
    nodes: int
    inner: Wire

    @property
    def crossing(self) -> int:
        """Channels whose ring enters the node at this rank, and as many leave it here; the members
        take turns."""
        return ceil(self.channels / self.members) if self.nodes > 1 else 0

    def ring_bytes(self) -> int:
        """Buffers to receive from the rank before and to send to the rank behind, in every channel.
        """
        inside = self.channels - self.crossing
        return inside * (self.inner.receive + self.inner.send) + self.crossing * (
            NETWORK.receive + NETWORK.send
        )

    def chain_bytes(self) -> int:
        """Bytes that trees add to the ring inside a node.

        Trees are a chain there, and data also runs back along it. A rank receives from the one
        behind it and sends to the one before it. Two ranks are neighbours both ways already.
        """
        first, last = self.position == 0, self.position == self.members - 1
        per_channel = self.inner.receive * (not last) + self.inner.send * (not first)
        return self.channels * per_channel if self.members > 2 else 0

    def tree_bytes(self) -> int:
        """Bytes that trees add between nodes. In two binary trees a node has on average two
        neighbours that the ring has not, where there are as many."""
        return self.crossing * min(2, max(0, self.nodes - 2)) * (NETWORK.receive + NETWORK.send)

    def nvls_bytes(self, channels: int) -> int:
        """NVLS in a node: `channels`, each with a buffer to reduce and one to broadcast for every
        head, at most 8."""
        return channels * 2 * NVLS_STEP * min(self.members, 8) if self.members > 1 else 0


def layout(
    cluster: ClusterSpec, ranks: tuple[int, ...], rank: int, *, channels: int, reads: bool
) -> Ring:
    """The communicator of `ranks`, which are evenly spaced, seen by `rank`. It has `channels`
    inside a node. Between nodes it has two per NIC that the group's members on a node have among
    them, at least two."""
    begin = cluster.node_of(rank) * cluster.devices_per_node
    first = bisect_left(ranks, begin)
    members = bisect_left(ranks, begin + cluster.devices_per_node) - first
    apart = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    spanned = cluster.node_of(ranks[-1]) - cluster.node_of(ranks[0]) + 1
    # further apart, each has a node of its own
    nodes = spanned if apart <= cluster.devices_per_node else len(ranks)
    if nodes > 1:
        channels = max(2, 2 * cluster.nics_per_node * members // cluster.devices_per_node)
    return Ring(
        channels=channels,
        members=members,
        position=bisect_left(ranks, rank) - first,
        nodes=nodes,
        inner=READS if reads else WRITES,
    )
