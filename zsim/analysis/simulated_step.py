"""The simulated step of a scenario: its times, their reasons, and the memory of its device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zsim.cluster.cluster import ClusterSpec
from zsim.errors import ZsimError
from zsim.ir.program import Program
from zsim.ir.run import RunRecord
from zsim.models import torch_versions
from zsim.runs.run import DeviceMemory
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zsim.analysis.causes.why import Why
    from zsim.engine.timeline import Timeline
    from zsim.memory.fits import MemoryVerdict
    from zsim.runs.backend import Backend


def simulated_step(scenario: Scenario) -> tuple[Program, Timeline]:
    """The Program of the scenario on its own cluster, with its faults, and its simulated times."""
    from zsim.engine.costs.op_costs import Costs
    from zsim.engine.faulty_step import simulate_faulty_step
    from zsim.scenario.plan import plan

    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    program = plan(scenario, device=scenario.cluster.kind)
    program = add_driver_calls(program, scenario, scenario.cluster)
    every = scenario.executed.detail == "steps"
    return simulate_faulty_step(program, scenario.faults, costs=costs, all_ranks=every)


def explain_step(
    scenario: Scenario, program: Program, timeline: Timeline, *, rank: int | None = None
) -> Why:
    """Reasons for the length of the step that `timeline` has of the scenario's `program`, on `rank`
    or on the rank that ends last."""
    from zsim.analysis.causes import critical_path
    from zsim.engine.costs.op_costs import Costs

    launch_queue = Costs(cluster=scenario.cluster, execution=scenario.executed).launch_queue
    answer = critical_path.explain(program, timeline, rank=rank, launch_queue=launch_queue)
    # where host and device are one thread, neither waits for the other
    return replace(answer, host_bound_ns=0) if scenario.executed.synchronous else answer


def add_driver_calls(program: Program, scenario: Scenario, cluster: ClusterSpec) -> Program:
    """`program` with the driver's calls of a step that fills the device, as of
    `zsim.memory.full_device`.

    Without figures of the GPU's non-torch memory it stays as it is.
    """
    from zsim.memory import full_device

    try:
        return full_device.on_device(program, scenario, cluster)
    except ZsimError:  # as in `device_memory`
        return program


@dataclass(slots=True)
class FilledDevice:
    """`add_driver_calls` that keeps the last Program and the verdict on it, which are wanted again.
    """

    program: Program | None = None
    verdict: MemoryVerdict | None = None

    def __call__(self, program: Program, scenario: Scenario, cluster: ClusterSpec) -> Program:
        """`program` with the driver's calls."""
        from zsim.memory import full_device
        from zsim.scenario.plan import Planned

        self.program, self.verdict = program, None
        try:
            self.verdict = full_device.verdict_if_full(program, scenario, cluster)
        except ZsimError:  # as in `device_memory`
            return program
        if self.verdict is None:
            return program
        return full_device.with_calls(Planned(scenario, program), self.verdict).program


def add_caches(scenario: Scenario, record: RunRecord, cluster: ClusterSpec) -> RunRecord:
    """The simulated `record` with the caching allocator of each rank; as it is on CPUs, and on a
    GPU without figures of its workspaces."""
    if record.interpreter != "simulator" or cluster.kind != "cuda":
        return record
    from zsim.memory.allocator.cache_record import cache_records
    from zsim.scenario.plan import plan

    steady = {rank.rank: rank.phases["steady"].memory for rank in record.ranks}
    try:
        torch = torch_versions.version_of(record.provenance.get("torch", ""))
        program = plan(scenario, device="cuda", torch=torch)
        caches = cache_records(scenario, program, cluster, steady)
    except ZsimError:  # as in `device_memory`
        return record
    ranks = tuple(replace(rank, cache=caches[rank.rank]) for rank in record.ranks)
    return replace(record, ranks=ranks)


def device_memory(
    scenario: Scenario, record: RunRecord, backend: Backend | None = None
) -> DeviceMemory | None:
    """The verdict of `zsim show --memory` on a scenario that `backend` has simulated last; None for
    real runs and CPUs, and for a GPU without figures of its non-torch memory."""
    if record.interpreter != "simulator" or scenario.cluster.kind != "cuda":
        return None
    from zsim.analysis import assessed
    from zsim.memory import fits
    from zsim.scenario.plan import Planned, planned

    last = getattr(backend, "on_device", None)
    known = last if isinstance(last, FilledDevice) else FilledDevice()
    try:
        case = Planned(scenario, known.program) if known.program else planned(scenario)
        verdict = known.verdict or fits.assess(case)
    except ZsimError:  # what a GPU without figures holds besides torch is not known
        return None
    return DeviceMemory(
        verdict=verdict.on_device, needed_bytes=verdict.needed.nbytes,
        low_bytes=verdict.needed.low, high_bytes=verdict.needed.high,
        capacity_bytes=verdict.capacity.nbytes,
        releases_per_step=verdict.releases_per_step,
        released_ns=assessed.released_ns(case, verdict),
        host=verdict.host,
    )

