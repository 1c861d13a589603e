"""Capacity: the least time in which links can carry what a collective has to move, whatever its
algorithm.

Presets have what NCCL counts on. Here links have the rate of their data sheet, so that only a wrong
time or size is faster. It knows no library and no algorithm.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from zsim.cluster import nic_sharing
from zsim.cluster.cluster import ClusterSpec

NVLINK_ON_SHEET, PCIE_ON_SHEET, NIC_ON_SHEET = Fraction(5, 4), Fraction(63, 48), Fraction(25, 24)
"""Rates of data sheets over those of presets: NVLink 25 GB/s of which NCCL counts 20, PCIe x16 63
of 48 GB/s, and NICs 4 % off their line (topo.h)."""
REDUCE_IN_NODE = ("hopper", "blackwell")
"""Generations whose NVSwitch reduces: a GPU sends and receives a message once."""
REDUCE_BETWEEN = ("ib",)
"""Networks whose switches may reduce (SHARP)."""


class LeastTime(NamedTuple):
    """Nanoseconds that links need at least: those of one device, and the NICs of a node."""

    device: int
    network: int

    @property
    def ns(self) -> int:
        """Nanoseconds of the busier kind."""
        return max(self.device, self.network)

    @property
    def link(self) -> str:
        """The busier kind, in words."""
        return "the NICs of a node" if self.network > self.device else "the links of a device"


def least(op: str, nbytes: int, *, cluster: ClusterSpec, ranks: tuple[int, ...]) -> LeastTime:
    """The least time of `op` over `ranks` with a message of `nbytes`, the full one.

    In a gather each rank receives what the others hold, in an all-to-all what they hold for it.
    Reductions move as much the other way, and an all-reduce both, where no switch reduces. KeyError
    for another collective.
    """
    per_node = Counter(map(cluster.node_of, ranks))
    if len(ranks) < 2:
        return LeastTime(0, 0)
    nics = nic_sharing.nics_of_ring(
        ranks, num_ranks=cluster.num_ranks, per_node=cluster.devices_per_node,
        nics=cluster.nics_per_node,
    ) if len(per_node) > 1 else {}
    share, rate = _of_device(op, len(ranks), cluster), _device_rate(cluster, between=bool(nics))
    return LeastTime(_ns(share * nbytes, rate), _network_ns(op, nbytes, per_node, nics, cluster))


def _of_device(op: str, num_ranks: int, cluster: ClusterSpec) -> Fraction:
    """Share of the message that a device receives or sends, the more of both."""
    lacked = Fraction(num_ranks - 1, num_ranks)
    in_switch = cluster.nccl is not None and cluster.nccl.generation in REDUCE_IN_NODE
    return {
        "all_gather": lacked, "reduce_scatter": lacked, "broadcast": Fraction(1),
        "all_to_all": lacked,
        "all_reduce": lacked if in_switch else 2 * lacked,
    }[op]


def _device_rate(cluster: ClusterSpec, *, between: bool) -> Fraction:
    """Bytes/s of a device's own links each way: its fabric, and its NICs where it uses them."""
    links = cluster.links
    if cluster.nccl is None:
        return Fraction(links.fabric.bandwidth + (links.rail.bandwidth if between else 0))
    if cluster.shares_pcie:
        return PCIE_ON_SHEET * links.pcie.bandwidth
    per_device = max(1, cluster.nics_per_node // cluster.devices_per_node) if between else 0
    return NVLINK_ON_SHEET * links.fabric.bandwidth + per_device * _nic_rate(cluster)


def _nic_rate(cluster: ClusterSpec) -> Fraction:
    """Bytes/s of a NIC on its line, or of its slot."""
    links = cluster.links
    if cluster.nccl is None:
        return Fraction(min(links.rail.bandwidth, links.pcie.bandwidth))
    return min(NIC_ON_SHEET * links.rail.bandwidth, PCIE_ON_SHEET * links.pcie.bandwidth)


def _network_ns(
    op: str, nbytes: int, per_node: Counter[int], nics: dict[int, Fraction], cluster: ClusterSpec
) -> int:
    """Nanoseconds of the node whose NICs need longest, and of all together.

    Whatever reduces, a node receives each number of an all-reduce at least once. Without switches
    that reduce all nodes together receive it twice but for one node.
    """
    if not nics:
        return 0
    rate, num_ranks = _nic_rate(cluster), per_node.total()
    longest = max(
        _ns(nbytes * _crossing(op, count, num_ranks), nics[node] * rate)
        for node, count in per_node.items()
    ) if op != "broadcast" else _ns(Fraction(nbytes), max(nics.values()) * rate)
    reduces = cluster.nccl is not None and cluster.nccl.fabric in REDUCE_BETWEEN
    if op != "all_reduce" or reduces:
        return longest
    all_nics = sum(nics.values(), Fraction(0))
    return max(longest, _ns(Fraction(2 * (len(nics) - 1) * nbytes), all_nics * rate))


def _crossing(op: str, count: int, num_ranks: int) -> Fraction:
    """Share of the message that a node of `count` ranks has to receive; in an all-to-all each of
    its ranks lacks another one."""
    lacked = Fraction(num_ranks - count, num_ranks)
    return {"all_to_all": count * lacked, "all_reduce": Fraction(1)}.get(op, lacked)


def _ns(nbytes: Fraction, bytes_per_s: Fraction) -> int:
    """Whole nanoseconds, rounded down: a bound."""
    return int(nbytes * 10**9 / bytes_per_s)
