"""The backend `sim`: plans a scenario, replays its memory, lets the engine stamp times on it, and
returns a Run.

The only place where Program, memory, costs and engine meet. Ranks that are alike are folded unless
asked otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.bands import error_bands
from zsim.engine.costs.op_costs import Costs
from zsim.engine.faults.arrivals import late_ranks
from zsim.engine.faults.fault import FAULT_KINDS, Jitter
from zsim.engine.faults.faulty_program import faulty_program
from zsim.engine.faulty_step import simulate_faulty_step, told_of
from zsim.engine.folding import in_step_off_device
from zsim.engine.simulate_step import is_by_columns, prepared_step, simulate_step
from zsim.engine.timeline import Timeline
from zsim.errors import DeadlockError, ZsimError
from zsim.ir.gc_pause import uncollected
from zsim.ir.laws import program_laws
from zsim.ir.laws.validate import validate
from zsim.ir.program import Program
from zsim.ir.run import (
    RunRecord,
    UnendedRunError,
    observed_ranks,
)
from zsim.models.torch_versions import NEWEST, TorchVersion
from zsim.runs.backend import Capabilities, RunOptions
from zsim.runs.simulated_ranks import ranks_of, until_the_step
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.version import __version__

DEFAULT_CLUSTERS: dict[str, str] = {"cpu": "cpu-gloo", "cuda": "dgx-h100"}
"""Clusters that stand for a real backend's own devices where the scenario's cluster is of another
kind."""

FEW_RANKS = "a few ranks, which suffice where all meet in each collective, and nothing is on hosts"
"""Ranks whose times may be asked for alone, in words."""
OnDevice = Callable[[Program, Scenario, ClusterSpec], Program]
class WorkError(ZsimError):
    """A scenario that is too much to simulate rank by rank."""


class SimBackend:
    """The simulator as a backend.

    Its Run predicts a real one on `device`, such a kind of device, or on that very `cluster`, by
    that version of `torch`. `on_device` gives a Program what follows from the device's memory.
    """

    name = "sim"

    def __init__(
        self, device: str | None = None, cluster: ClusterSpec | None = None,
        torch: TorchVersion = NEWEST, on_device: OnDevice = lambda program, *_: program,
    ) -> None:
        self.on_device = on_device
        self.device = device
        self.cluster = cluster
        self.torch = torch

    def capabilities(self) -> Capabilities:
        """Memory and time, no numerics."""
        return Capabilities(
            memory=True, numerics=False, time=True, device=self.device or "cuda",
            faults=tuple(FAULT_KINDS),
        )

    @uncollected()
    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """The simulated Run: of one rank of each kind, of `options.ranks`, or of all ranks.

        UnendedRunError where its faults keep the step from ending.
        """
        cluster = self.cluster or cluster_for(scenario, self.device)
        costs = Costs(cluster=cluster, execution=scenario.executed_on(cluster))
        stepwise = costs.execution.detail == "steps"
        every = options.all_ranks or stepwise
        program = _program(
            scenario, cluster, all_ranks=every, torch=self.torch,
            kept=None if options.ranks is None else len(options.ranks),
        )
        program = self.on_device(program, scenario, cluster)
        if _is_unlike(scenario) and not every:
            _require_columns(program, scenario, costs)
        begun = RunRecord(
            scenario=scenario.name, backend=self.name, interpreter="simulator",
            world_size=scenario.world_size, mesh=scenario.mesh, ranks=(),
            provenance={
                **_provenance(scenario, cluster), "torch": self.torch,
                **(observed_ranks(sorted(options.ranks)) if options.ranks else {}),
                **(_of_rings(program, costs) if stepwise else {}),
            },
        )
        if scenario.faults:
            try:
                program, timeline = simulate_faulty_step(
                    program, scenario.faults, costs=costs, all_ranks=every, note_hops=options.hops
                )
            except DeadlockError as error:
                ended = until_the_step(
                    begun, program, ranks=range(scenario.world_size) if every else options.ranks
                )
                faults = tuple(map(str, scenario.faults))
                raise UnendedRunError(
                    error, replace(ended, complete=False, failure=str(error), faults=faults)
                ) from None
        else:
            timeline = simulate_step(
                program, costs=costs, all_ranks=every, note_hops=options.hops
            )
        band = "{:.4f} {:.4f}".format(*error_bands.band(program, timeline, costs=costs))
        return replace(
            begun,
            ranks=ranks_of(program, _shown(timeline, options), costs=costs, timeline=timeline),
            step_time_ns=timeline.step_time_ns,
            representatives=() if every or options.ranks else timeline.representatives,
            provenance={**begun.provenance, "band": band},
            hops=timeline.hops,
            faults=told_of(scenario.faults),
            late=late_ranks(program, timeline) if scenario.faults else (),
        )


@uncollected()
def require_lawful(scenario: Scenario, *, device: str) -> None:
    """ProgramError where the Program of a real Run on that kind of device breaks a law."""
    program = _program(scenario, cluster_for(scenario, device), all_ranks=False)
    program_laws.require_lawful(program, where=scenario.name)


def _program(
    scenario: Scenario, cluster: ClusterSpec, *, all_ranks: bool, torch: TorchVersion = NEWEST,
    kept: int | None = None,
) -> Program:
    """The Program, held to the rules of the IR but for its memory, which `_phases` replays.

    `kept`: the number of ranks whose times are kept; None: of all that are simulated.
    """
    unlike, work = _is_unlike(scenario), scenario.work
    fits = unlike and not all_ranks and not work.problem(all_ranks=True, by_columns=True)
    few = kept is not None and not replace(work, num_ranks=kept).problem(all_ranks=True)
    problem = "" if fits and few else work.problem(all_ranks=all_ranks or unlike)
    if problem:
        raise WorkError(
            where=scenario.name, expected="less work", found=problem,
            remedy=f"or ask for the times of {FEW_RANKS}" if fits else "",
        )
    program = plan(scenario, device=cluster.kind, torch=torch)
    if not in_step_off_device(program) and (problem := scenario.work.problem(all_ranks=True)):
        raise WorkError(where=scenario.name, expected="less work", found=problem)
    return validate(program, memory=False)


def _is_unlike(scenario: Scenario) -> bool:
    """True where no two ranks are alike."""
    return any(isinstance(fault, Jitter) for fault in scenario.faults)


def _require_columns(program: Program, scenario: Scenario, costs: Costs) -> None:
    """WorkError where ranks that are all distinct are too many to be simulated by events."""
    problem = scenario.work.problem(all_ranks=True)
    if problem and not is_by_columns(
        prepared_step(faulty_program(program, scenario.faults), costs=costs)
    ):
        raise WorkError(
            where=scenario.name, expected="less work", found=problem,
            remedy=f"also for {FEW_RANKS}",
        )


def cluster_for(scenario: Scenario, device: str | None, *, preset: str = "") -> ClusterSpec:
    """The scenario's cluster, or one of another `device` with as many ranks: `preset`, or the
    default one."""
    if device is None or device == scenario.cluster.kind:
        return scenario.cluster
    name, ranks = preset or DEFAULT_CLUSTERS[device], scenario.world_size
    per_node = load_cluster(name).devices_per_node
    return load_cluster(name, nodes=1 if device == "cpu" else -(-ranks // per_node), ranks=ranks)


def _shown(timeline: Timeline, options: RunOptions) -> dict[int, int]:
    """The ranks to show and how many ranks each stands for."""
    if options.ranks is not None:
        return dict.fromkeys(sorted(options.ranks), 1)
    return dict(sorted(Counter(timeline.representatives).items()))


def _of_rings(program: Program, costs: Costs) -> dict[str, str]:
    """The provenance of a Run whose rings are simulated as steps: that they are, and what goes
    round none."""
    from zsim.engine.ring_steps.work import closed_forms

    others = ", ".join(closed_forms(program, costs))
    return {"detail": "steps", **({"closed_form": others} if others else {})}


def _provenance(scenario: Scenario, cluster: ClusterSpec) -> dict[str, str]:
    return {
        "zsim": __version__, "seed": str(scenario.seed), "steps": str(scenario.steps),
        "strategy": scenario.strategy, "fingerprint": scenario.fingerprint,
        "computes_in": scenario.precision.narrowest, "cluster": cluster.name,
        "device": cluster.kind, "device_name": cluster.device.name,
        **({"power": f"{cluster.device.power} W"} if cluster.device.power else {}),
        "calibration": error_bands.calibration(
            cluster, scenario.executed, uses_drives=scenario.offload.uses_drives
        ),
        **(
            {"allocator": "expandable_segments:True"}
            if scenario.expandable_segments and cluster.kind == "cuda"
            else {}
        ),
    }
