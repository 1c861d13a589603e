"""NCCL's collectives over ranks where they are on a cluster: of NCCL's files this one alone
knows clusters."""

from __future__ import annotations

from fractions import Fraction

from zsim.cluster.cluster import ClusterSpec, Path
from zsim.cluster.collectives import ring
from zsim.cluster.collectives.nccl import durations, estimate, measured_curves
from zsim.cluster.collectives.nccl.channel_search import cube_mesh_gb_s
from zsim.cluster.collectives.nccl.tuner import hop_us
from zsim.cluster.library import Library
from zsim.errors import ScenarioError


def communicator(cluster: ClusterSpec, path: Path) -> estimate.Communicator:
    """NCCL's view of `path`; ScenarioError on a cluster whose preset says nothing about NCCL."""
    node = cluster.nccl
    if node is None:
        raise ScenarioError((f'cluster {cluster.name}: expected a table "nccl", found none; '
                             f'collectives = "ring" needs none',))
    inside_ns, between_ns = cluster.hop_ns
    bus_gb_s = path.bytes_per_s / 10**9
    if node.generation == "volta" and path.num_nodes == 1:  # a cube mesh, of which parts have less
        bus_gb_s = min(bus_gb_s, cube_mesh_gb_s(path.num_ranks))
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


def _placed_ns(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int:
    return estimate.time_ns(
        op, nbytes, communicator(cluster, path), measured_curves.curves_of(cluster)
    )


def _algorithm(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> str:
    return estimated_along(op, nbytes, cluster=cluster, path=path).algorithm


def _half_width(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> float:
    along = estimated_along(op, nbytes, cluster=cluster, path=path)
    return (along.high - along.low) / 2 / along.microseconds


def _channels(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> tuple[int, bool]:
    algorithm = estimated_along(op, nbytes, cluster=cluster, path=path).algorithm
    channels = estimate.channels(communicator(cluster, path), algorithm)
    return channels, algorithm in ("nvls", "nvls_tree")


LIBRARY = Library(
    bytes_sent=estimate.bytes_sent,
    duration_ns=estimate.duration_ns,
    steps=estimate.steps,
    num_sends=ring.num_sends,
    placed_ns=_placed_ns,
    algorithm=_algorithm,
    half_width=_half_width,
    channels=_channels,
)
