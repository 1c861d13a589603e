"""Collectives: bytes on the wire, steps and nanoseconds of each library's algorithms. Pure
functions, one file each.

Both `duration_ns` and `steps` take one latency and one bandwidth, and agree with each other. A
simulation asks `placed_ns`, the time of a group of ranks where they are on a cluster. The table
alone knows clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from zsim.cluster.cluster import ClusterSpec, Path
from zsim.cluster.collectives import gloo, ring
from zsim.cluster.collectives.nccl import durations, estimate, measured_curves
from zsim.cluster.collectives.nccl.channel_search import in_node
from zsim.cluster.collectives.nccl.tuner import hop_us
from zsim.cluster.collectives.ring import RingStep
from zsim.cluster.measured_times import times_of
from zsim.errors import ScenarioError


class BytesSent(Protocol):
    """Bytes that one rank puts on the wire."""

    def __call__(
        self, op: str, nbytes: int, *, group_size: int, rank: int = 0, root: int = 0
    ) -> int: ...


class DurationNs(Protocol):
    """Nanoseconds of a whole collective over links of latency α and bandwidth β without other
    traffic."""

    def __call__(
        self, op: str, nbytes: int, *, group_size: int, alpha_ns: int, bytes_per_s: int
    ) -> int: ...


class PlacedNs(Protocol):
    """Nanoseconds of a whole collective along `path`, a ring over ranks of `cluster`, on links
    without other traffic."""

    def __call__(self, op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int: ...


class Steps(Protocol):
    """The sends of each step."""

    def __call__(
        self, op: str, nbytes: int, *, group_size: int, root: int = 0
    ) -> Iterator[RingStep]: ...


class NumSends(Protocol):
    """Number of sends in all steps."""

    def __call__(self, op: str, nbytes: int, *, group_size: int) -> int: ...


class AlgorithmName(Protocol):
    """Name of the algorithm behind the time of a collective along `path`: "ring" where that is
    its `steps`."""

    def __call__(self, op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> str: ...


RING = "ring"
"""Name of the algorithm whose steps go round a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One library's all_gather, reduce_scatter, all_reduce and broadcast."""

    bytes_sent: BytesSent
    duration_ns: DurationNs
    steps: Steps
    num_sends: NumSends
    placed_ns: PlacedNs
    algorithm: AlgorithmName


def _along_the_path(duration_ns: DurationNs) -> PlacedNs:
    """The closed form over the mean latency and the narrowest hop of a ring over the ranks."""

    def placed_ns(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int:
        return duration_ns(
            op, nbytes, group_size=path.num_ranks, alpha_ns=path.alpha_ns,
            bytes_per_s=path.bytes_per_s,
        )

    return placed_ns


def _by_gloo(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int:
    measured = times_of(cluster.times, op, path.num_ranks, nodes=path.num_nodes)
    if measured is not None:
        return measured.ns(nbytes)
    return gloo.in_practice_ns(
        op, _along_the_path(gloo.duration_ns)(op, nbytes, cluster=cluster, path=path),
        group_size=path.num_ranks,
    )


def communicator(cluster: ClusterSpec, path: Path) -> estimate.Communicator:
    """NCCL's view of `path`; ScenarioError on a cluster whose preset says nothing about NCCL."""
    node = cluster.nccl
    if node is None:
        raise ScenarioError((f'cluster {cluster.name}: expected a table "nccl", found none; '
                             f'collectives = "ring" needs none',))
    inside_ns, between_ns = cluster.hop_ns
    bus_gb_s = path.bytes_per_s / 10**9
    if node.generation == "volta" and path.num_nodes == 1:  # a cube mesh, of which parts have less
        graph = in_node(node.generation, path.num_ranks)
        bus_gb_s = min(bus_gb_s, graph.channels * graph.intra)
    return estimate.Communicator(
        generation=node.generation,
        num_ranks=path.num_ranks,
        num_nodes=path.num_nodes,
        fullest=path.fullest,
        bus_gb_s=bus_gb_s,
        inside_gb_s=cluster.links.fabric.bandwidth / 10**9,
        network_gb_s=path.network_bytes_per_s / 10**9,
        fabric=node.fabric,
        processor=node.processor,
        links=node.links,
        nics=max(1, cluster.nics_per_node * path.fullest // cluster.devices_per_node),
        longer_inside_us=_beyond(inside_ns, hop_us(node.links)),
        longer_between_us=_beyond(between_ns, hop_us("network")),
    )


def _beyond(hop_ns: int, usual_us: float) -> float:
    """µs by which a hop is longer than NCCL takes it to be for large messages. A shorter hop gains
    nothing, for NCCL's curves are measured with the networks that there are."""
    return max(0.0, hop_ns / 1000 - usual_us)


def reached_bytes_per_s(cluster: ClusterSpec, path: Path) -> Fraction:
    """Bytes/s that a ring along `path` reaches on its narrowest link. NCCL's are more than those of
    its search on some links."""
    if cluster.collectives != "nccl":
        return Fraction(path.bytes_per_s)
    group = communicator(cluster, path)
    reached = durations.bus_gb_s(group, measured_curves.curves_of(cluster).constants)
    return max(Fraction(path.bytes_per_s), Fraction(reached) * 10**9)


def estimated(
    op: str, nbytes: int, *, cluster: ClusterSpec, ranks: tuple[int, ...]
) -> estimate.Estimate:
    """NCCL's time for `op` over `ranks` with its band and provenance, without what torch adds; at
    least two ranks."""
    return estimated_along(op, nbytes, cluster=cluster, path=cluster.path(ranks))


def estimated_along(
    op: str, nbytes: int, *, cluster: ClusterSpec, path: Path
) -> estimate.Estimate:
    """The answer of `estimated` where the ranks' `path` is known."""
    return estimate.estimate(
        op, nbytes, communicator(cluster, path), measured_curves.curves_of(cluster)
    )


def _by_nccl(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int:
    return estimate.time_ns(
        op, nbytes, communicator(cluster, path), measured_curves.curves_of(cluster)
    )


def _algorithm_of_gloo(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> str:
    return "tree" if op == "broadcast" else RING


def _algorithm_of_nccl(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> str:
    return estimate.estimate(
        op, nbytes, communicator(cluster, path), measured_curves.curves_of(cluster)
    ).algorithm


LIBRARIES: dict[str, Library] = {
    "ring": Library(
        bytes_sent=ring.bytes_sent,
        duration_ns=ring.duration_ns,
        steps=ring.steps,
        num_sends=ring.num_sends,
        placed_ns=_along_the_path(ring.duration_ns),
        algorithm=lambda op, nbytes, *, cluster, path: RING,
    ),
    "gloo": Library(
        bytes_sent=gloo.bytes_sent,
        duration_ns=gloo.duration_ns,
        steps=gloo.steps,
        num_sends=gloo.num_sends,
        placed_ns=_by_gloo,
        algorithm=_algorithm_of_gloo,
    ),
    "nccl": Library(
        bytes_sent=estimate.bytes_sent,
        duration_ns=estimate.duration_ns,
        steps=estimate.steps,
        num_sends=ring.num_sends,
        placed_ns=_by_nccl,
        algorithm=_algorithm_of_nccl,
    ),
}
