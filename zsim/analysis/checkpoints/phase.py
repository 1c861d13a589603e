"""Time and memory of a Program in which ranks save or load, by simulation.

Bandwidths of the file system and of the link to the host decide its time. Its band is that of
simulations with both at their ends. It knows no format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.analysis.checkpoints.reshard import CheckpointError
from zsim.analysis.checkpoints.save import STAGED
from zsim.cluster.cluster import ClusterSpec
from zsim.engine.costs import Costs
from zsim.engine.simulate import simulate
from zsim.ir.host_ledger import replay_host
from zsim.ir.ledger_replay import replay
from zsim.ir.program import Program
from zsim.memory.host import host_memory
from zsim.scenario.scenario import Scenario

WIDTHS = {"measured": 0.2, "calibrated": 0.2, "published": 0.3}
"""Half-width of a bandwidth of files or of the link to the host, by its provenance. Assumed."""
ASSUMED = 0.5
"""Half-width of others: half to twice the bandwidth, as 1 / (1 - 0.5)."""
MOST_RANKS = 16
"""Ranks up to which each is simulated by itself; of more, one of each kind, all in step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTime:
    """Nanoseconds of a save or a load, and of its part in which training waits, each with its band.
    """

    ns: int
    band_ns: tuple[int, int]
    blocking_ns: int
    blocking_band_ns: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMemory:
    """Most bytes while a save or a load runs: on a device, in a rank's host memory, and in that of
    the fullest node. Those that are held all the time are among them."""

    device_bytes: int
    host_bytes: int
    node_host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPhase:
    """A save or a load: Program, time and memory."""

    program: Program
    time: CheckpointTime
    memory: CheckpointMemory


def phase_of(scenario: Scenario, program: Program, name: str) -> CheckpointPhase:
    """The phase `name` of a scenario's checkpoint; CheckpointError where a host has no room."""
    cluster = scenario.cluster
    memory = CheckpointMemory(
        device_bytes=max(
            replay(rank, timeline=False)["steady"].peak_bytes for rank in program.ranks
        ),
        host_bytes=max(replay_host(rank)["steady"].peak_bytes for rank in program.ranks),
        node_host_bytes=_in_host(program, cluster, name),
    )
    ends = [_times(program, scenario, each) for each in (cluster, *_ends_of_band(cluster))]
    (whole, blocking), (slow, slow_blocking), (fast, fast_blocking) = ends
    time = CheckpointTime(
        ns=whole, band_ns=(fast, slow), blocking_ns=blocking,
        blocking_band_ns=(fast_blocking, slow_blocking),
    )
    return CheckpointPhase(program=program, time=time, memory=memory)


def _in_host(program: Program, cluster: ClusterSpec, name: str) -> int:
    """Bytes of host memory on the node that needs most; CheckpointError where it has less."""
    needed = host_memory(program, cluster)
    if needed is None:
        return 0
    if needed.verdict == "OOM":
        raise CheckpointError(
            where=f"checkpoint: {name}",
            expected=f"host memory for {needed.offloaded_bytes:,} B on one node",
            found=f"{needed.capacity_bytes:,} B in {cluster.name}",
            remedy='format = "sharded" leaves each rank its own part, and needs least without '
                   "asynchronous",
        )
    return needed.offloaded_bytes


def _ends_of_band(cluster: ClusterSpec) -> tuple[ClusterSpec, ClusterSpec]:
    """The cluster with file system and link to the host at the slow ends of their bands, and at the
    fast ones."""
    assert cluster.file_system is not None
    files_width = max(
        _width(cluster, f"file_system.{key}") for key in ("bandwidth", "rank_bandwidth")
    )
    link_width = _width(cluster, "links.host.bandwidth")

    def at(slower: bool) -> ClusterSpec:
        of_files, of_link = (
            1 - width if slower else 1 / (1 - width) for width in (files_width, link_width)
        )
        assert cluster.file_system is not None
        return replace(
            cluster,
            file_system=replace(
                cluster.file_system,
                bandwidth=int(cluster.file_system.bandwidth * of_files),
                rank_bandwidth=int(cluster.file_system.rank_bandwidth * of_files),
            ),
            links=replace(
                cluster.links,
                host=replace(
                    cluster.links.host, bandwidth=int(cluster.links.host.bandwidth * of_link)
                ),
            ),
        )

    return at(True), at(False)


def _width(cluster: ClusterSpec, key: str) -> float:
    figure = next((figure for figure in cluster.figures if figure.key == key), None)
    if figure is not None and figure.width is not None:
        return figure.width
    return WIDTHS.get(figure.provenance if figure else "assumed", ASSUMED)


def _times(program: Program, scenario: Scenario, cluster: ClusterSpec) -> tuple[int, int]:
    """Nanoseconds of the whole Program, and of the part in which training waits."""
    timeline = simulate(
        program, costs=Costs(cluster, scenario.executed_on(cluster)),
        all_ranks=program.mesh.world_size <= MOST_RANKS,
    )
    staged = [
        times.ends[op.index]
        for rank, times in timeline.ranks.items()
        for op in program.of_rank(rank).steady
        if op.unit == STAGED
    ]
    return timeline.step_time_ns, max(staged, default=timeline.step_time_ns)
