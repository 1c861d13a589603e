"""Memory of a node's host: the bytes of offloaded states of all its ranks against what it has.

Offloaded bytes are exact, and what else is in host memory is banded. It reads Programs and knows no
strategy and no time.
"""

from __future__ import annotations

from collections import Counter

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.host import HostMemory
from zsim.ir.host_ledger import replay_host
from zsim.ir.program import PHASES, Program

PROCESS, MOST_PROCESS = 3 * 2**30, 8 * 2**30
"""Host memory of a rank's process with torch, CUDA and a data loader, as expected and at most.
Assumed."""
SYSTEM, MOST_SYSTEM = 8 * 2**30, 32 * 2**30
"""Host memory of a node's operating system and daemons, as expected and at most. Assumed."""


def host_memory(program: Program, cluster: ClusterSpec) -> HostMemory | None:
    """The host memory of the node whose ranks need most; None where nothing is offloaded."""
    if not any(op.host for rank in program.ranks for phase in PHASES for op in rank.phase(phase)):
        return None
    records = [replay_host(rank) for rank in program.ranks]
    highest = [max(own.values(), key=lambda record: record.peak_bytes) for own in records]
    pinned = [max(record.pinned_bytes for record in own.values()) for own in records]
    locked = [max(record.locked_bytes for record in own.values()) for own in records]
    rounding = [max(record.rounding_bytes for record in own.values()) for own in records]
    size = cluster.devices_per_node
    nodes = {
        program.assignment[start : start + size]
        for start in range(0, program.mesh.world_size, size)
    }
    ranks = max(nodes, key=lambda kinds: sum(highest[kind].peak_bytes for kind in kinds))
    by_kind, has_device = Counter[str](), cluster.kind == "cuda"  # a CPU's own is of the same host
    for kind in ranks:
        by_kind.update(highest[kind].by_kind)
    return HostMemory(
        num_ranks=len(ranks), offloaded_bytes=sum(highest[kind].peak_bytes for kind in ranks),
        pinned_bytes=sum(pinned[kind] for kind in ranks),
        locked_bytes=sum(locked[kind] for kind in ranks), by_kind=dict(by_kind),
        rounding_bytes=sum(rounding[kind] for kind in ranks) * has_device,
        other_bytes=(SYSTEM + len(ranks) * PROCESS) * has_device,
        most_other_bytes=(MOST_SYSTEM + len(ranks) * MOST_PROCESS) * has_device,
        capacity_bytes=cluster.host.memory,
    )
