"""Work that offloading leaves to the host: copies over PCIe, steps of the optimizer, drives.

Each has a rate that it reaches alone, and takes shares of a PCIe switch's link, of a node's memory
and of its drives. `zsim.engine.contention` divides those among the ranks of a node. Streams
and strategies play no part.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from fractions import Fraction

from zsim.cluster.cluster import ClusterSpec
from zsim.engine.execution import EAGER, Execution
from zsim.ir.ops import PAGEABLE, Kernel

PAGEABLE_SHARE = Fraction(2, 5)
"""Rate of copies from pageable memory over that of pinned: 0.3 to 0.5 are reported. Assumed."""
PASSES: Mapping[str, Fraction] = {"foreach": Fraction(1, 2), "for-loop": Fraction(1, 3)}
"""Share of a thread's bandwidth in steps of several passes over their operands. Measured on a
thread of an EPYC: torch's foreach steps 0.243e9 parameters/s, for-loop 0.165e9. At 80 B each that
is 19 and 13 of 40 GB/s."""
NARROW = Fraction(1, 2)
"""Share of a thread's bandwidth in a fused step of elements of two bytes, which takes as long as
one of four. Measured as above: torch's steps 1.23e9 elements/s of bf16, 1.61e9 of fp16, 1.57e9 of
float32."""

DRIVE_LATENCY_NS = 200_000
"""Time from a request to a drive to its first bytes.

Ten rates of a drive of 6.4 GB/s, with 1 to 128 requests of 64 or 256 KiB at once, are met within
43 %. Seven are met within 25 %. Source: github.com/0xBakeer/deepseek-v41-flash-spark, issue 2.
"""

FILES = "files"
"""The location of reads and writes of files, whose file system all ranks share."""


def is_link(kernel: Kernel) -> bool:
    """True for a copy between device and host."""
    return kernel.location == "link"


def alone_ns(kernel: Kernel, cluster: ClusterSpec, execution: Execution = EAGER) -> int:
    """The ns of work off the device that has the whole node to itself; rounded up, at least 1."""
    return max(1, -(-kernel.nbytes * 10**9 // _rate(kernel, cluster, execution)))


def queued_rate(rate: int, nbytes: int) -> int:
    """Bytes/s of a drive of `rate` for a rank with `nbytes` of requests at once, 0 for enough.

    A byte takes its time on the drive and its part of the latency, 1/rate + latency/bytes.
    """
    if not nbytes:
        return rate
    return max(1, rate * nbytes * 10**9 // (nbytes * 10**9 + rate * DRIVE_LATENCY_NS))


def _rate(kernel: Kernel, cluster: ClusterSpec, execution: Execution) -> int:
    """Bytes/s alone: of the link, of files and drives, or of the rank's threads up to what the
    node's memory gives."""
    if kernel.location == FILES:
        assert cluster.file_system is not None
        return cluster.file_system.alone
    if kernel.location == "drive":
        return queued_rate(_drive_rate(kernel, cluster), execution.drive_queue_nbytes)
    if is_link(kernel):
        link = cluster.links.host.bandwidth
        return int(link * PAGEABLE_SHARE) if kernel.operator.endswith(PAGEABLE) else link
    threads = threads_of(cluster, execution)
    if not threads:
        return cluster.host_memory_bandwidth
    _, _, implementation = kernel.operator.partition(".")
    share = PASSES.get(implementation, Fraction(1))
    if implementation == "fused" and kernel.dtype in ("bfloat16", "float16"):
        share = NARROW
    streamed = threads * cluster.host.thread_bandwidth * share
    return min(cluster.host_memory_bandwidth, int(streamed))


def _drive_rate(kernel: Kernel, cluster: ClusterSpec) -> int:
    assert cluster.drives is not None, "a scenario without drives is refused"
    return cluster.drives.read if kernel.operator == "read" else cluster.drives.write


def by_threads(
    kernels: Collection[Kernel], cluster: ClusterSpec, execution: Execution
) -> tuple[float, float]:
    """Times of steps on the host with the rank's part of all cores, and with one thread, over that
    with the threads of `execution`.

    All ranks of a node step at once. Both are 1 for no steps, and where the scenario says its
    threads.
    """
    if execution.host_threads is not None:
        return 1.0, 1.0
    part = cluster.host_memory_bandwidth / neighbours(cluster)
    took = [
        sum(each.nbytes / min(_rate(each, cluster, threads), part) for each in kernels)
        for threads in (
            execution, replace(execution, torchrun=False), replace(execution, host_threads=1)
        )
    ]
    return (took[1] / took[0], took[2] / took[0]) if took[0] else (1.0, 1.0)


def bound_by_threads(
    kernels: Collection[Kernel], cluster: ClusterSpec, execution: Execution
) -> bool:
    """True where a rank's threads are too few for its part of the memory's bandwidth, in some of
    its `kernels` on the host."""
    part = cluster.host_memory_bandwidth / neighbours(cluster)
    return any(_rate(kernel, cluster, execution) < part for kernel in kernels)


def threads_of(cluster: ClusterSpec, execution: Execution = EAGER) -> int | Fraction:
    """Threads of each rank for its step on the host: whole cores, or a share of one where ranks are
    more. 0 where neither the scenario nor the cluster's file says.

    torchrun sets OMP_NUM_THREADS to 1 where it starts several ranks of a node
    (torch/distributed/run.py). DeepSpeed's launcher leaves it unset or, with
    `--bind_cores_to_rank`, divides the cores (deepspeed/launcher/launch.py).
    """
    if execution.host_threads:
        return execution.host_threads
    cores, ranks = cluster.host.cores, neighbours(cluster)
    own = cores // ranks if cores >= ranks else Fraction(cores, ranks)
    return min(own or 1, 1) if execution.torchrun and ranks > 1 else own


def neighbours(cluster: ClusterSpec) -> int:
    """The ranks of a full node."""
    return min(cluster.devices_per_node, cluster.num_ranks)


def shares(
    kernel: Kernel, cluster: ClusterSpec, execution: Execution = EAGER
) -> dict[str, Fraction]:
    """The shares that work off the device takes at full speed, by resource: its device's link, its
    switch's, the node's memory and drives.

    A copy reads or writes each byte once in host memory. Directions of a link are apart, and both
    at once reach `Host.duplex` of their sum.
    """
    rate = Fraction(_rate(kernel, cluster, execution))
    if cluster.file_system is not None and kernel.location == FILES:
        return {FILES: rate / cluster.file_system.bandwidth}
    memory = {"memory": rate / cluster.host_memory_bandwidth}
    if kernel.location == "drive":
        return memory | {f"drive {kernel.operator}": rate / _drive_rate(kernel, cluster)}
    if not is_link(kernel):
        return memory
    direction = kernel.operator.removesuffix(PAGEABLE)
    used = rate / cluster.links.host.bandwidth
    both = used / (2 * Fraction(cluster.host.duplex).limit_denominator(1000))
    return memory | {
        f"device {direction}": used, f"switch {direction}": used, "device both": both,
        "switch both": both,
    }


def usage(
    kernels: tuple[Kernel, ...], times: Mapping[Kernel, int], rank: int, cluster: ClusterSpec, *,
    in_step: bool, execution: Execution = EAGER,
) -> dict[Hashable, Fraction]:
    """The shares that an op takes on average over its `times` alone, by resource of a rank's node.

    With ranks `in_step` one stands for all of its node: they want the same at the same time.
    """
    total = sum(times[kernel] for kernel in kernels)
    like: dict[tuple[str, str], tuple[Kernel, int]] = {}
    for kernel in kernels:
        if kernel.location != "device":
            first, ns = like.setdefault((kernel.location, kernel.operator), (kernel, 0))
            like[kernel.location, kernel.operator] = first, ns + times[kernel]
    means: dict[str, Fraction] = {}
    for kernel, ns in like.values():
        taken = shares(kernel, cluster, execution)
        for resource, share in taken.items():
            means[resource] = means.get(resource, Fraction(0)) + share * Fraction(ns, total)
    per_switch = cluster.host.devices_per_switch
    node, index = divmod(rank, cluster.devices_per_node)
    located: dict[str, tuple[Hashable, int]] = {
        "device": (rank, 1),
        "switch": ((node, index // per_switch), min(per_switch, neighbours(cluster))),
        "memory": (node, neighbours(cluster)), "drive": (node, neighbours(cluster)),
        FILES: (None, cluster.num_ranks),
    }
    made: dict[Hashable, Fraction] = {}
    for resource, share in means.items():
        where, sharing = located[resource.partition(" ")[0]]
        made["host", resource, rank if in_step else where] = share * (sharing if in_step else 1)
    return made
