"""The functions of `import zsim`: scenarios simulated, run for real, validated, fitted, explained.

The command line calls these functions, and so can a notebook or a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING

from zsim.analysis.simulated_step import (
    FilledDevice,
    add_caches,
    add_driver_calls,
    device_memory,
    explain_step,
    simulated_step,
)
from zsim.cluster.cluster import ClusterSpec
from zsim.errors import ArgumentError
from zsim.io.arguments import described, path_of
from zsim.ir.laws import run_laws
from zsim.ir.run import RunRecord
from zsim.models import torch_versions
from zsim.models.training_options import Device
from zsim.runs import real_run, saved, unended
from zsim.runs.backend import Backend, Capabilities, RunOptions
from zsim.runs.compare.aspects import Aspect
from zsim.runs.comparison import Comparison, compare_records
from zsim.runs.modes import ComputeMode, NumericsMode
from zsim.runs.real_run import measure, observe, observe_until_meant_end, with_module
from zsim.runs.run import Run
from zsim.runs.simulator import SimBackend, cluster_for
from zsim.scenario.scenario import Scenario, load
from zsim.scenario.scenario_argument import require_scenario

if TYPE_CHECKING:
    from zsim.analysis.causes.why import Why
    from zsim.analysis.fit.fit_table import Fit
    from zsim.cluster.testbed import Layout

__all__ = [
    "Comparison", "Run", "Scenario", "compare", "fit", "load", "load_run", "run", "simulate",
    "validate", "why",
]

MAKES_A_RUN = "zsim.simulate(scenario) returns one"
SAVES_A_RUN = "run.save(path) writes one"


def simulate(
    scenario: Scenario, *, ranks: Sequence[int] | None = None, all_ranks: bool = False
) -> Run:
    """The scenario's steady step, simulated: memory to the byte, collectives, and time.

    Ranks that are alike are simulated once, unless `all_ranks`; with `ranks` only those are shown.
    ZsimError where the scenario is too much work, or `ranks` are not in it.

    >>> simulate(load("scenarios/parity/fsdp2-mlp-4.toml")).collectives["all_gather"].count
    7
    """
    return run(scenario, backend="sim", ranks=ranks, all_ranks=all_ranks)


def run(
    scenario: Scenario,
    *,
    backend: str = "sim",
    ranks: Sequence[int] | None = None,
    all_ranks: bool = False,
    interpreter: str | None = None,
    timeout_s: float = 120.0,
    module: str | None = None,
    numerics: NumericsMode | None = None,
    device: Device | None = None,
) -> Run:
    """The scenario on a backend: "sim" simulates it, "gloo" and "nccl" train it for real, "fake"
    observes single ranks.

    `interpreter`: "executor" or "observer", for a real backend; by default the observer where torch
    has the strategy. `timeout_s`: seconds until a rank counts as hung. `module`: the function that
    makes your own module, as "mypackage.mymodel:build", which takes the place of the model.
    `numerics`: the ranks that train a single-process reference, "full" for all, "sampled" for the
    first, "none"; by default as many as memory and time allow. `device`: "cpu" or "cuda", for
    "fake", whose ranks run on either. BackendUnavailableError where torch, devices or memory lack;
    RankError where a rank fails.
    """
    from zsim.analysis import scenario_warnings  # it plans: nothing that every import should load

    require_scenario(scenario)
    options = RunOptions(
        ranks=ranks,
        all_ranks=all_ranks,
        interpreter=interpreter,
        timeout_s=timeout_s,
        module=module,
        numerics=numerics,
        device=device,
    )
    runner, capabilities = open_backend(backend, options)
    scenario = with_module(runner, scenario, options)
    record = observe(runner, capabilities, scenario, options)
    warnings = tuple(caveat.text for caveat in scenario_warnings.caveats(scenario))
    needs = device_memory(scenario, record, runner)
    return Run(record=record, scenario=scenario, warnings=warnings, device_memory=needs)


def validate(
    scenario: Scenario,
    *,
    against: str = "gloo",
    ranks: Sequence[int] | None = None,
    all_ranks: bool = False,
    interpreter: str | None = None,
    timeout_s: float = 120.0,
    require: tuple[Aspect, ...] = (),
    cluster: str | PathLike[str] | None = None,
    module: str | None = None,
    numerics: NumericsMode | None = None,
    device: Device | None = None,
    testbed: str | None = None,
    compute: ComputeMode = "real",
) -> Comparison:
    """The scenario run for real, simulated for the same device, and the two compared.

    Arguments and errors as those of `run`. The cluster is replaced by the backend's own devices.
    `require`: aspects such as "time", without whose check the comparison is not ok. `cluster`: the
    file of this machine's constants; by default the one that `zsim calibrate --here` left in the
    user's cache. Without any, the time of CPU ranks is not judged. `testbed`: the shaped network
    that gloo's ranks run on, as "4x1gbit". `compute`: "emulated" puts timers in the place of
    forward and backward in timed steps.
    """
    from zsim.calibration.machine.choice import find_machine, load_machine, shape_links

    require_scenario(scenario)
    options = RunOptions(
        ranks=ranks, all_ranks=all_ranks, interpreter=interpreter, timeout_s=timeout_s,
        module=module,
        numerics=numerics,
        device=device,
    )
    backend, capabilities = real_run.open_real_backend(against, options)
    layout = None if testbed is None else _layout(testbed)
    scenario = with_module(backend, scenario, options)
    host = load_machine(scenario, find_machine(capabilities, scenario, cluster))
    host, options = shape_links(backend, scenario, host, options, testbed=layout, compute=compute)
    record = measure(backend, capabilities, scenario, options)
    return compare_with_simulation(scenario, record, capabilities, required=require, cluster=host)


def compare(
    predicted: Run | RunRecord | str | PathLike[str],
    measured: Run | RunRecord | str | PathLike[str], *,
    require: tuple[Aspect, ...] = (),
) -> Comparison:
    """Two runs of one scenario, check by check: collectives, bytes, memory, numerics, time.

    Paths and records are those of saved Runs, as `load_run` takes and returns them. `require`:
    aspects without whose check the comparison is not ok.

    >>> run = simulate(load("scenarios/parity/fsdp2-mlp-4.toml"))
    >>> compare(run, run).agreement.checked
    ('order', 'bytes', 'memory')
    """
    sides = {"predicted": predicted, "measured": measured}
    records = (_record(run, where=side) for side, run in sides.items())
    return compare_records(*records, required=require)


def load_run(path: str | PathLike[str]) -> RunRecord:
    """The record of a Run that `Run.save` or `--save` wrote: ranks, memory, collectives, times.

    SavedRunError where the file is none; ZsimError where it breaks a law of Runs.

    >>> from tempfile import TemporaryDirectory
    >>> run = simulate(load("scenarios/parity/fsdp2-mlp-4.toml"))
    >>> with TemporaryDirectory() as folder:
    ...     run.save(f"{folder}/run.json")
    ...     load_run(f"{folder}/run.json") == run.record
    True
    """
    file = path_of(path, where="path", expected="the path of a saved Run", remedy=SAVES_A_RUN)
    record = saved.load(file)
    remedy = "the file was changed, or the backend that wrote it has a defect"
    run_laws.require_lawful(record, where=str(path), remedy=remedy)
    return record


def fit(scenario: Scenario, *, say: Callable[[str], None] | None = None) -> Fit:
    """Every strategy and way of checkpointing on the scenario's cluster, and which to take. `say`
    is told of the progress.

    ScenarioError where so many simulations would take minutes.

    >>> fit(load("scenarios/parity/fsdp2-mlp-4.toml")).recommended.name
    'ddp'
    """
    from zsim.analysis.fit import fit as fitting

    require_scenario(scenario)
    return fitting.fit(scenario, say=say)


def why(run: Run) -> Why:
    """Reasons for the length of the steady step: exposed collectives, the critical path.

    It is of the simulated step of the run's scenario, on the rank that ends last.

    >>> list(why(simulate(load("scenarios/parity/fsdp2-mlp-4.toml"))).by_reason)
    ['longer than the compute over it', 'a dependency']
    """
    if not isinstance(run, Run):
        raise ArgumentError(where="run", expected="a Run", found=described(run), remedy=MAKES_A_RUN)
    return explain_step(run.scenario, *simulated_step(run.scenario))


def open_backend(name: str, options: RunOptions) -> tuple[Backend, Capabilities]:
    """The backend called `name` and its senses; the simulator fills its device as it would."""
    simulator = SimBackend(on_device=FilledDevice())
    return real_run.open_backend(name, options, simulator=simulator)


def compare_with_simulation(
    scenario: Scenario, measured: RunRecord, capabilities: Capabilities, *,
    required: tuple[Aspect, ...] = (), cluster: ClusterSpec | None = None,
) -> Comparison:
    """The record `measured`, compared with the scenario simulated for the same device, ranks and
    version of torch.

    `cluster`: the one that the ranks ran on, in place of a preset of such devices.
    """
    from zsim.calibration.machine.choice import preset_of_gpus  # start-up: few runs are real

    cluster = cluster or preset_of_gpus(scenario, capabilities)
    torch = torch_versions.version_of(measured.provenance.get("torch", ""))
    predictor = SimBackend(
        device=capabilities.device, cluster=cluster, torch=torch, on_device=add_driver_calls
    )
    options = RunOptions(ranks=tuple(rank.rank for rank in measured.ranks))
    predicted = observe_until_meant_end(predictor, predictor.capabilities(), scenario, options)
    if any(rank.cache for rank in measured.ranks):
        on = cluster or cluster_for(scenario, capabilities.device)
        predicted = add_caches(scenario, predicted, on)
    replaced = (
        ""
        if scenario.cluster.kind == capabilities.device
        else f"{scenario.cluster.name} replaced by {capabilities.device} devices of this machine, "
             f"planned again for them"
    )
    comparison = compare_records(predicted, measured, replaced=replaced, required=required)
    own = tuple(unended.checks(scenario, predicted, measured))
    return replace(comparison, checks=own + comparison.checks) if own else comparison


def _record(run: Run | RunRecord | str | PathLike[str], *, where: str) -> RunRecord:
    if isinstance(run, Run | RunRecord):
        return run if isinstance(run, RunRecord) else run.record
    expected = "a Run, or the path of a saved one"
    return load_run(path_of(run, where=where, expected=expected, remedy=MAKES_A_RUN))


def _layout(text: object) -> Layout:
    if not isinstance(text, str):
        raise ArgumentError(
            where="testbed", expected="a layout as text", found=described(text),
            remedy='as "4x1gbit"',
        )
    from zsim.cluster import testbed  # start-up: few runs shape links

    return testbed.layout(text)

