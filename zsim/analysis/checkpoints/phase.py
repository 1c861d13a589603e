"""Time and memory of a Program in which ranks save or load, by simulation.

Bandwidths of the file system, of the link to the host and of the host's memory decide its time.
Its band is that of simulations with all of them at their ends. It knows no format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.analysis.checkpoints.reshard import CheckpointMemoryError
from zsim.analysis.checkpoints.save import STAGED
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.host import HostMemory, HostVerdict
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate import simulate
from zsim.ir.host_ledger import replay_host
from zsim.ir.ledger_replay import replay
from zsim.ir.program import Program
from zsim.memory.fits import FitsVerdict, MemoryVerdict, assess_program
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
    the fullest node. Those that are held all the time are among them. Verdicts are of the device
    and of the node."""

    device_bytes: int
    host_bytes: int
    node_host_bytes: int
    on_device: FitsVerdict
    on_host: HostVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPhase:
    """A save or a load: Program, time and memory."""

    program: Program
    time: CheckpointTime
    memory: CheckpointMemory


def phase_of(scenario: Scenario, program: Program, name: str) -> CheckpointPhase:
    """The phase `name` of a scenario's checkpoint; CheckpointMemoryError where a device or a host
    has no room for it."""
    cluster = scenario.cluster
    needed = assess_program(program, cluster, expandable_segments=scenario.expandable_segments)
    if needed.on_device == "OOM":
        raise _device_error(scenario, program, name, needed)
    if needed.host is not None and needed.host.verdict == "OOM":
        raise _host_error(scenario, name, needed.host)
    memory = CheckpointMemory(
        device_bytes=max(
            replay(rank, timeline=False)["steady"].peak_bytes for rank in program.ranks
        ),
        host_bytes=max(replay_host(rank)["steady"].peak_bytes for rank in program.ranks),
        node_host_bytes=needed.host.offloaded_bytes if needed.host else 0,
        on_device=needed.on_device, on_host=needed.host.verdict if needed.host else "FITS",
    )
    ends = [_times(program, scenario, each) for each in (cluster, *_ends_of_band(cluster))]
    (whole, blocking), (slow, slow_blocking), (fast, fast_blocking) = ends
    time = CheckpointTime(
        ns=whole, band_ns=(fast, slow), blocking_ns=blocking,
        blocking_band_ns=(fast_blocking, slow_blocking),
    )
    return CheckpointPhase(program=program, time=time, memory=memory)


def _device_error(
    scenario: Scenario, program: Program, name: str, needed: MemoryVerdict
) -> CheckpointMemoryError:
    """A device that lacks room for the state itself, or for what is gathered beside it."""
    device, chosen = scenario.cluster.device, scenario.checkpoint
    state = max(
        replay(rank, timeline=False)["construction"].end_bytes for rank in program.ranks
    )
    if state > needed.capacity.high:
        remedy = (
            f"the state of {scenario.strategy} alone is {state:,} B a rank: shard it over more "
            "ranks, as fsdp2 and zero3 do, or offload it"
        )
    elif name == "save" and not chosen.cpu_offload:
        remedy = "checkpoint.cpu_offload = true keeps what is gathered in rank 0's host memory"
    else:
        remedy = "more ranks leave each a smaller part of the state"
        if chosen.format == "consolidated":
            remedy = f'format = "sharded" gathers nothing; {remedy}'
    return CheckpointMemoryError(
        where=f"checkpoint: {name}: OOM",
        expected=f"device memory for {needed.needed.low:,} B on rank {needed.rank}",
        found=f"{needed.capacity.nbytes:,} B of {device.name} in {scenario.cluster.name}",
        remedy=remedy,
    )


def _host_error(scenario: Scenario, name: str, needed: HostMemory) -> CheckpointMemoryError:
    remedy = (
        'format = "sharded" leaves each rank its own part, and needs least without asynchronous'
    )
    if name == "convert":
        remedy = (
            "checkpoint.extract_workers and merge_workers are the processes that hold a rank's "
            "file, or a parameter, each"
        )
    elif scenario.checkpoint.format == "universal":
        remedy = (
            "stage 3 holds all float32 weights on each rank, stages 1 and 2 a part; "
            'format = "deepspeed" loads on as many ranks'
        )
    return CheckpointMemoryError(
        where=f"checkpoint: {name}: OOM",
        expected=f"host memory for {needed.offloaded_bytes:,} B on one node",
        found=f"{needed.capacity_bytes:,} B in {scenario.cluster.name}",
        remedy=remedy,
    )


def _ends_of_band(cluster: ClusterSpec) -> tuple[ClusterSpec, ClusterSpec]:
    """The cluster with the file system and the link to the host at the slow ends of their bands,
    and at the fast ones. So are the memory of the host and its threads."""
    assert cluster.file_system is not None
    files_width = max(
        _width(cluster, f"file_system.{key}") for key in ("bandwidth", "rank_bandwidth")
    )
    link_width = _width(cluster, "links.host.bandwidth")
    host_width = _width(cluster, "host.memory_bandwidth")
    thread_width = _width(cluster, "host.thread_bandwidth")

    def at(slower: bool) -> ClusterSpec:
        of_files, of_link, of_host, of_thread = (
            1 - width if slower else 1 / (1 - width)
            for width in (files_width, link_width, host_width, thread_width)
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
            host_memory_bandwidth=int(cluster.host_memory_bandwidth * of_host),
            host=replace(
                cluster.host, thread_bandwidth=int(cluster.host.thread_bandwidth * of_thread)
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
