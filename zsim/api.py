"""The functions of `import zsim`: scenarios simulated, run for real, validated, fitted, explained.

The command line calls these functions, and so can a notebook or a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zsim.cluster.cluster import ClusterSpec, load_cluster
from zsim.engine.faults.fault import SlowLink
from zsim.errors import ArgumentError, ZsimError
from zsim.io.arguments import described, path_of
from zsim.ir.laws import run_laws
from zsim.ir.run import IncompleteRunError, RunRecord, UnendedRunError
from zsim.models import torch_versions
from zsim.models.training_options import Device
from zsim.runs import fault_support, registry, saved, simulator, unended
from zsim.runs.backend import (
    Backend,
    Capabilities,
    DeviceChoice,
    Gpus,
    MeasuringBackend,
    ModuleBackend,
    RunOptions,
)
from zsim.runs.compare.aspects import ASPECTS, Aspect
from zsim.runs.numerics_mode import NumericsMode
from zsim.runs.run import Comparison, DeviceMemory, Run
from zsim.scenario.scenario import Scenario, load
from zsim.scenario.scenario_argument import require_scenario

if TYPE_CHECKING:
    from zsim.analysis.fit.fit_table import Fit
    from zsim.analysis.why import Why
    from zsim.cluster.testbed import Layout
    from zsim.engine.timeline import Timeline
    from zsim.ir.program import Program

__all__ = [
    "Comparison", "Run", "Scenario", "compare", "fit", "load", "load_run", "run", "simulate",
    "validate", "why",
]

REAL_BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "nccl"}
"""The backend that validates by default, by the device of its ranks."""
COMPUTES = ("real", "emulated")
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
    scenario = of_module(runner, scenario, options)
    record = observed(runner, capabilities, scenario, options)
    warnings = tuple(caveat.text for caveat in scenario_warnings.caveats(scenario))
    needs = device_memory(scenario, record)
    return Run(record=record, scenario=scenario, warnings=warnings, device_memory=needs)


def device_memory(scenario: Scenario, record: RunRecord) -> DeviceMemory | None:
    """The verdict of `zsim show --memory` on a simulated scenario; None for real runs and CPUs, and
    for a GPU without figures of its non-torch memory."""
    if record.interpreter != "simulator" or scenario.cluster.kind != "cuda":
        return None
    from zsim.analysis import assessed
    from zsim.memory import fits
    from zsim.scenario.plan import planned

    try:
        case = planned(scenario)
        verdict = fits.assess(case)
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


def on_device(program: Program, scenario: Scenario, cluster: ClusterSpec) -> Program:
    """`program` with the driver's calls of a step that fills the device, as of
    `zsim.memory.full_device`.

    Without figures of the GPU's non-torch memory it stays as it is.
    """
    from zsim.memory import full_device

    try:
        return full_device.on_device(program, scenario, cluster)
    except ZsimError:  # as in `device_memory`
        return program


def with_caches(scenario: Scenario, record: RunRecord, cluster: ClusterSpec) -> RunRecord:
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
    compute: str = "real",
) -> Comparison:
    """The scenario run for real, simulated for the same device, and the two compared.

    Arguments and errors as those of `run`. The cluster is replaced by the backend's own devices.
    `require`: aspects such as "time", without whose check the comparison is not ok. `cluster`: the
    file of this machine's constants; by default the one that `zsim calibrate --here` left in the
    user's cache. Without any, the time of CPU ranks is not judged. `testbed`: the shaped network
    that gloo's ranks run on, as "4x1gbit". `compute`: "emulated" puts timers in the place of
    forward and backward in timed steps.
    """
    require_scenario(scenario)
    options = RunOptions(
        ranks=ranks, all_ranks=all_ranks, interpreter=interpreter, timeout_s=timeout_s,
        module=module,
        numerics=numerics,
        device=device,
    )
    backend, capabilities = open_real_backend(against, options)
    layout = None if testbed is None else _layout(testbed)
    scenario = of_module(backend, scenario, options)
    host = machine_cluster(scenario, machine_of(capabilities, scenario, cluster))
    host, options = shaped(backend, scenario, host, options, testbed=layout, compute=compute)
    record = measured(backend, capabilities, scenario, options)
    return validated(scenario, record, capabilities, required=require, cluster=host)


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
    return compared(*records, required=require)


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


def _record(run: Run | RunRecord | str | PathLike[str], *, where: str) -> RunRecord:
    if isinstance(run, Run | RunRecord):
        return run if isinstance(run, RunRecord) else run.record
    expected = "a Run, or the path of a saved one"
    return load_run(path_of(run, where=where, expected=expected, remedy=MAKES_A_RUN))


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
    return reasons(run.scenario, *simulated_step(run.scenario))


def simulated_step(scenario: Scenario) -> tuple[Program, Timeline]:
    """The Program of the scenario on its own cluster, with its faults, and its simulated times."""
    from zsim.engine.costs.op_costs import Costs
    from zsim.engine.faulty_step import simulate_faulty_step
    from zsim.scenario.plan import plan

    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    program = plan(scenario, device=scenario.cluster.kind)
    program = on_device(program, scenario, scenario.cluster)
    every = scenario.executed.detail == "steps"
    return simulate_faulty_step(program, scenario.faults, costs=costs, all_ranks=every)


def reasons(
    scenario: Scenario, program: Program, timeline: Timeline, *, rank: int | None = None
) -> Why:
    """Reasons for the length of the step that `timeline` has of the scenario's `program`, on `rank`
    or on the rank that ends last."""
    from zsim.analysis import critical_path
    from zsim.engine.costs.op_costs import Costs

    launch_queue = Costs(cluster=scenario.cluster, execution=scenario.executed).launch_queue
    answer = critical_path.explain(program, timeline, rank=rank, launch_queue=launch_queue)
    # where host and device are one thread, neither waits for the other
    return replace(answer, host_bound_ns=0) if scenario.executed.synchronous else answer


def open_backend(
    name: str, options: RunOptions, *, where: str = "backend"
) -> tuple[Backend, Capabilities]:
    """The backend called `name` and its senses; ZsimError where it cannot run with `options`."""
    backend = registry.find(name, where=where)
    if isinstance(backend, registry.SimBackend):
        backend = registry.SimBackend(on_device=on_device)
    for argument in ("interpreter", "device"):
        if backend.name == registry.SimBackend.name and getattr(options, argument):
            raise ArgumentError(where=argument, expected="a real backend", found=backend.name)
    if options.device is not None:
        if not hasattr(backend, "on"):
            raise ArgumentError(
                where="device", expected="a backend whose devices can be chosen",
                found=backend.name, remedy="leave device out",
            )
        backend = cast(DeviceChoice, backend).on(options.device)
    return backend, registry.capabilities(backend)


def open_real_backend(name: str, options: RunOptions) -> tuple[Backend, Capabilities]:
    """Backend and its capabilities, as `open_backend`; ArgumentError for the simulator,
    which would be compared with itself."""
    if name == registry.SimBackend.name:
        raise ArgumentError(where="against", expected="a backend that runs for real", found=name)
    return open_backend(name, options, where="against")


def observed(
    backend: Backend, capabilities: Capabilities, scenario: Scenario, options: RunOptions
) -> RunRecord:
    """The record that `backend` makes of `scenario`, held to the laws of Runs; its provenance says
    what the backend can see."""
    outside = [rank for rank in options.ranks or () if not 0 <= rank < scenario.world_size]
    if outside:
        expected = f"ranks 0 to {scenario.world_size - 1} of {scenario.name}"
        raise ArgumentError(where="ranks", expected=expected, found=str(outside[0]))
    kinds = (*capabilities.faults, *((SlowLink.kind,) if options.testbed else ()))
    fault_support.require(scenario, kinds, backend=backend.name)
    try:
        record = registry.ask(backend, scenario, options=options)
    except (IncompleteRunError, UnendedRunError) as error:
        error.run = _seen(error.run, capabilities, scenario)
        raise
    run_laws.require_lawful(record, where=scenario.name)
    return _seen(record, capabilities, scenario)


def _seen(record: RunRecord, capabilities: Capabilities, scenario: Scenario) -> RunRecord:
    """The record with what its backend can see, and with the scenario's faults."""
    senses = {
        "memory": capabilities.memory, "numerics": capabilities.numerics, "time": capabilities.time
    }
    sees = " ".join(sense for sense, there in senses.items() if there)
    faults = record.faults or tuple(map(str, scenario.faults))
    return replace(record, provenance={**record.provenance, "sees": sees}, faults=faults)


def _observed_or_meant(
    backend: Backend, capabilities: Capabilities, scenario: Scenario, options: RunOptions
) -> RunRecord:
    """The record as of `observed`, also that of a step which is meant not to end."""
    try:
        return observed(backend, capabilities, scenario, options)
    except (IncompleteRunError, UnendedRunError) as error:
        if unended.expected(scenario, error, backend=backend.name) is None:
            raise
        return error.run


def of_module(backend: Backend, scenario: Scenario, options: RunOptions) -> Scenario:
    """The scenario with the module that `options` name, if any, in place of its model.

    The simulator has no torch: the fake backend traces, for the scenario's own device.
    """
    if options.module is None:
        return scenario
    device = None
    if isinstance(backend, registry.SimBackend):
        backend, device = registry.find("fake"), scenario.cluster.kind
    if not hasattr(backend, "with_module"):
        raise ArgumentError(
            where="module", expected="a backend that can run a user's own module",
            found=backend.name, remedy="fake, gloo and nccl can",
        )
    return cast(ModuleBackend, backend).with_module(
        scenario, options.module, timeout_s=options.timeout_s, device=device
    )


def measured(
    backend: Backend, capabilities: Capabilities, scenario: Scenario, options: RunOptions
) -> RunRecord:
    """The record that a real `backend` makes of `scenario`, incomplete where its step is meant not
    to end; ZsimError where it simulates all the same, or where the Program breaks a law, which
    might hang its ranks."""
    simulator.require_lawful(scenario, device=capabilities.device)
    record = _observed_or_meant(backend, capabilities, scenario, options)
    if record.interpreter == "simulator":
        defect = "one of the simulator, which would be compared with itself"
        raise registry.BackendError(
            where=f"backend {backend.name}", expected="a Run that was measured", found=defect
        )
    return record


def validated(
    scenario: Scenario, measured: RunRecord, capabilities: Capabilities, *,
    required: tuple[Aspect, ...] = (), cluster: ClusterSpec | None = None,
) -> Comparison:
    """The record `measured`, compared with the scenario simulated for the same device, ranks and
    version of torch.

    `cluster`: the one that the ranks ran on, in place of a preset of such devices.
    """
    cluster = cluster or _cluster_of_gpus(scenario, capabilities)
    torch = torch_versions.version_of(measured.provenance.get("torch", ""))
    predictor = registry.SimBackend(
        device=capabilities.device, cluster=cluster, torch=torch, on_device=on_device
    )
    options = RunOptions(ranks=tuple(rank.rank for rank in measured.ranks))
    predicted = _observed_or_meant(predictor, predictor.capabilities(), scenario, options)
    if any(rank.cache for rank in measured.ranks):
        on = cluster or simulator.cluster_for(scenario, capabilities.device)
        predicted = with_caches(scenario, predicted, on)
    replaced = (
        ""
        if scenario.cluster.kind == capabilities.device
        else f"{scenario.cluster.name} replaced by {capabilities.device} devices of this machine, "
             f"planned again for them"
    )
    comparison = compared(predicted, measured, replaced=replaced, required=required)
    own = tuple(unended.checks(scenario, predicted, measured))
    return replace(comparison, checks=own + comparison.checks) if own else comparison


def _cluster_of_gpus(scenario: Scenario, capabilities: Capabilities) -> ClusterSpec | None:
    """The preset of this machine's GPUs with the scenario's ranks, where the scenario names other
    devices and there is one."""
    if capabilities.gpus is None or scenario.cluster.kind == capabilities.device:
        return None
    from zsim.calibration.machine import device_file

    try:
        preset = device_file.base_of(capabilities.gpus, "").cluster
    except ZsimError:  # a GPU of another name: the default cluster, whose time is not judged
        return None
    return simulator.cluster_for(scenario, capabilities.device, preset=preset)


def _layout(text: object) -> Layout:
    if not isinstance(text, str):
        raise ArgumentError(
            where="testbed", expected="a layout as text", found=described(text),
            remedy='as "4x1gbit"',
        )
    from zsim.cluster import testbed  # start-up: few runs shape links

    return testbed.layout(text)


def shaped(
    backend: Backend, scenario: Scenario, base: ClusterSpec | None, options: RunOptions, *,
    testbed: Layout | None, compute: str,
) -> tuple[ClusterSpec | None, RunOptions]:
    """The cluster that predicts ranks on `testbed` with such `compute`, and options to run them.

    `base` is this machine's; it is returned where there are neither. The scenario's slow links are
    slow on the testbed too.
    """
    if compute not in COMPUTES:
        raise ArgumentError(
            where="compute", expected=" or ".join(COMPUTES), found=described(compute)
        )
    if compute == "emulated":  # which options may refuse, before links are measured
        known = base or load_cluster("cpu-gloo", ranks=scenario.world_size)
        options = replace(options, emulated_on=known)
    testbed = testbed and fault_support.on_testbed(scenario, testbed)
    cluster = shaped_cluster(backend, scenario, base, testbed)
    if options.emulated_on is not None:
        cluster = (cluster or options.emulated_on).with_idle_cores
        options = replace(options, emulated_on=cluster)
    return cluster, replace(options, testbed=testbed)


def shaped_cluster(
    backend: Backend, scenario: Scenario, base: ClusterSpec | None, testbed: Layout | None
) -> ClusterSpec | None:
    """The cluster `base` on the links of `testbed`, whose collectives are measured first; `base`
    itself without a testbed."""
    if testbed is None:
        return base
    if getattr(backend, "measure", None) is None:
        raise ArgumentError(
            where="testbed", expected="a backend whose ranks use the network", found=backend.name,
            remedy="--against gloo",
        )
    if testbed.hosts != scenario.world_size:
        raise ArgumentError(
            where="testbed", expected=f"{scenario.world_size} hosts, one for each rank",
            found=f"{testbed.hosts}, {testbed.text}",
        )
    from zsim.calibration.machine import shaped

    return shaped.calibrated(cast(MeasuringBackend, backend), testbed, base=base)


def machine_cluster(scenario: Scenario, machine: Path | None) -> ClusterSpec | None:
    """The cluster of the file `machine` with the scenario's ranks; None without a file."""
    if machine is None:
        return None
    from zsim.scenario.parts import cluster_file

    return cluster_file.load(str(machine), folder=None, nodes=1, ranks=scenario.world_size)


def machine_of(
    capabilities: Capabilities, scenario: Scenario, cluster: str | PathLike[str] | None
) -> Path | None:
    """The file of the machine that real ranks run on: `cluster` where it is given, else what
    `zsim calibrate --here` has left in the user's cache; None where there is none, or where that of
    GPUs says nothing of the scenario."""
    if cluster is not None:
        remedy = "`zsim calibrate --here --out FILE.toml` writes one"
        path = path_of(
            cluster, where="cluster", expected="the path of a cluster's file", remedy=remedy
        )
        if not path.is_file():
            raise ArgumentError(
                where="cluster", expected="a cluster's file", found=f"none at {path}",
                remedy=remedy,
            )
        return path
    from zsim.calibration.machine import machine_file

    cached = machine_file.cached(scenario.world_size, capabilities.gpus)
    if capabilities.gpus is not None:
        return None if not_of_gpus(capabilities.gpus, scenario) else cached
    return cached if capabilities.device == "cpu" and cached.is_file() else None


def not_of_gpus(gpus: Gpus, scenario: Scenario) -> str:
    """The reason that times are those of a preset and not of this machine's GPUs; "" where the
    file of a calibration has them."""
    from zsim.calibration.machine import device_file, machine_file

    cached = machine_file.cached(scenario.world_size, gpus)
    if not cached.is_file():
        return "nobody has measured them; `zsim calibrate --here --backend nccl` does"
    from zsim.scenario.parts import cluster_file

    cluster = cluster_file.load(str(cached), folder=None, nodes=1, ranks=None)
    return device_file.unfit(cluster, scenario)


def compared(
    predicted: RunRecord, measured: RunRecord, *, replaced: str = "",
    required: tuple[Aspect, ...] = (),
) -> Comparison:
    """The checks of `measured` against `predicted`; `replaced` and `required` as Comparison has
    them."""
    from zsim.runs.compare import compare as comparing  # start-up: most commands compare nothing

    if unknown := [name for name in required if name not in ASPECTS]:
        raise ArgumentError(
            where="require", expected=f"some of {', '.join(ASPECTS)} in a tuple",
            found=described(unknown[0]), remedy='as require=("time",)',
        )
    return Comparison(
        checks=comparing.compare(predicted, measured), predicted=predicted, measured=measured,
        replaced=replaced, required=required,
    )
