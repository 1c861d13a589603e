"""Times of collectives on a testbed, measured over its links, and the cluster that has them.

Ranks of a step never arrive together, so ranks arrive apart here. Gloo's all-gather over two ranks
then takes half as long again: a receiver's request for data queues behind its own data.
"""

from __future__ import annotations

from statistics import median

from zsim.calibration.machine.fit import growing
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.measured_times import MeasuredTimes
from zsim.cluster.testbed import Layout, cluster_on
from zsim.runs.backend import CollectiveRequest, MachineRequest, MeasuringBackend

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
SIZES = (2**10, 2**14, 2**16, 2**18, 2**20, 2**22, 2**23)
"""Bytes of the full messages."""
LONGEST_S = 1.5
"""Seconds that one size of one collective may take; large messages repeat less for it."""
MOST_REPEATS, LEAST_REPEATS = 15, 5
APART_NS = 300_000
"""Time between arrivals: more than a packet takes from host to host, as in steps."""
WIDTH = 0.08


def calibrated(
    backend: MeasuringBackend, layout: Layout, *, base: ClusterSpec | None = None
) -> ClusterSpec:
    """The cluster of `layout`, with the times of collectives over groups of ranks next to one
    another, and over a rank of each node; `base` has the constants of the host's own work."""
    plain = cluster_on(layout, base=base)
    groups = [(ranks, 1) for ranks in range(2, layout.hosts + 1) if layout.hosts % ranks == 0]
    if layout.uplink is not None and layout.hosts_per_node > 1:
        groups.append((layout.nodes, layout.hosts_per_node))
    collectives = [
        CollectiveRequest(
            kind=kind, nbytes=nbytes, ranks=ranks, stride=stride, apart_ns=APART_NS,
            repeats=_repeats(nbytes, layout),
        )
        for ranks, stride in groups
        for kind in KINDS
        for nbytes in SIZES
    ]
    measured = backend.measure(MachineRequest(
        world_size=layout.hosts, scenarios=(), collectives=tuple(collectives), repeats=1,
        timeout_s=300.0, testbed=layout,
    ))
    points: dict[tuple[str, int, int], list[tuple[int, int, float]]] = {}
    for each, times in zip(collectives, measured.collectives, strict=True):
        group = each.kind, each.ranks, each.stride
        points.setdefault(group, []).append((each.nbytes, round(median(times)), 0.0))
    return cluster_on(layout, base=base, times=tuple(
        MeasuredTimes(
            collective=kind, ranks=ranks, points=tuple(growing(curve)), width=WIDTH,
            source="measured alone on the testbed",
            nodes=plain.path(tuple(range(0, ranks * stride, stride))).num_nodes,
        )
        for (kind, ranks, stride), curve in points.items()
    ))


def _repeats(nbytes: int, layout: Layout) -> int:
    slowest = min((*layout.rates, layout.uplink or layout.rates[0])) / 8
    once = 2 * nbytes / slowest
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(LONGEST_S / once)))
