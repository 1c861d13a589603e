"""What the commands of `zsim` do: load scenarios, call backends, compare, and hand the result to the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from zsim import (
    accuracy_commands,
    advice,
    answer,
    backends,
    calibrate_commands,
    cautions,
    compare,
    fit,
    laws,
    memory_report,
    outside,
    places,
    plan,
    report,
    saved,
    snapshot,
    time_report,
    trace,
    waterfall,
)
from zsim.errors import ScenarioError, ZsimError
from zsim.run import SCHEMA_VERSION, Backend, Capabilities, IncompleteRunError, Run, RunOptions
from zsim.scenario import Scenario, load
from zsim.work import MANY_TIMES


class UsageError(ZsimError):
    """Arguments that do not go together."""


def scenario_files(arguments: list[str]) -> tuple[Path, ...]:
    """The files named, and every .toml below a folder that is named, sorted."""
    found: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        try:
            inside = sorted(path.rglob("*.toml")) if path.is_dir() else [path]
        except (OSError, ValueError) as error:
            raise ScenarioError((f"{argument[:200]!r}: cannot be looked up: {getattr(error, 'strerror', None) or error}",)) from None
        if not inside:
            raise ScenarioError((f"{path}: expected scenario files in this folder, found none",))
        found += inside
    return tuple(dict.fromkeys(found))


def load_all(arguments: list[str]) -> tuple[Scenario, ...]:
    """Every scenario; one ScenarioError with the problems of all files that have some."""
    scenarios: list[Scenario] = []
    problems: list[str] = []
    for path in scenario_files(arguments):
        try:
            scenarios.append(load(path))
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(tuple(problems))
    return tuple(scenarios)


def _require_distinct(scenarios: tuple[Scenario, ...]) -> None:
    """Files are named by scenario, so each needs a name of its own."""
    names = [scenario.name for scenario in scenarios]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(where="--save, --trace", expected="scenarios of different names", found=f"several called {twice[0]}")


def _read(arguments: list[str], scenario: Scenario) -> tuple[Path, ...]:
    """Every file that is read, which no result may be written over: scenarios, and what `scenario` names."""
    return (*scenario_files(arguments), *scenario.files)


def run(options: argparse.Namespace) -> int:
    """`zsim run`: 0 when every expectation held. Of several scenarios one that cannot run stops no other."""
    scenarios = load_all(options.scenarios)
    if options.save or options.trace:
        _require_distinct(scenarios)
    backend = backends.find(options.backend)
    how, several = _how(options), len(scenarios) > 1
    capabilities = backends.capabilities(backend)
    if options.trace and not capabilities.time:
        expected = "a backend that sees time, as sim does"
        raise UsageError(where="--trace", expected=expected, found=f"{backend.name}, whose trace would be empty")
    if backend.name == backends.SimBackend.name and options.interpreter:
        raise UsageError(where="--interpreter", expected="a real backend", found=backend.name)
    reports: list[report.RunReport] = []
    failures: list[tuple[str, ZsimError]] = []
    for scenario in scenarios:
        try:
            reports.append(_run(scenario, backend, capabilities, options, how=how, several=several))
        except ZsimError as error:
            if not several:
                raise
            failures.append((scenario.name, error))
            report.print_failure(scenario.name, error)
    report.print_runs(reports, failures, as_json=options.json, several=several)
    return max([int(not one.ok) for one in reports] + [error.exit_code for _, error in failures])


def _run(
    scenario: Scenario,
    backend: Backend,
    capabilities: Capabilities,
    options: argparse.Namespace,
    *,
    how: RunOptions,
    several: bool,
) -> report.RunReport:
    place = _place(options.save, scenario, several, ".json") if options.save else None
    traced_to = _place(options.trace, scenario, several, ".trace.json.gz") if options.trace else None
    taken = _read(options.scenarios, scenario)
    for option, kind, target in (("--save", "a Run", place), ("--trace", "a trace", traced_to)):
        if target:
            places.require(target, option=option, apart_from=taken, kind=kind)
            taken += (target,)
    warnings = _warned(scenario)
    with report.progress(f"{scenario.name} on {backend.name}"), keeping_what_there_is(place):
        found = observed(backend, capabilities, scenario, how)
    if place:
        saved.save(found, place)
    if traced_to:
        trace.write(found, traced_to)
    return report.of_run(found, scenario, warnings=warnings)


def validate(options: argparse.Namespace) -> int:
    """`zsim validate`: 0 when every check that can be made is fine. Of several scenarios one that cannot run stops no other."""
    scenarios, how = load_all(options.scenarios), _how(options)
    if options.save:
        _require_distinct(scenarios)
    backend = backends.find(options.against)
    if backend.name == backends.SimBackend.name:
        raise UsageError(where="--against", expected="a backend that runs for real", found=backend.name)
    capabilities, several = backends.capabilities(backend), len(scenarios) > 1
    reports: list[report.CheckReport] = []
    failures: list[tuple[str, ZsimError]] = []
    for scenario in scenarios:
        try:
            reports.append(_validated(scenario, backend, capabilities, options, how=how))
        except ZsimError as error:
            if not several:
                raise
            failures.append((scenario.name, error))
            report.print_failure(scenario.name, error)
            continue
        if not options.json:
            report.print_checks(reports[-1])
    if options.json:
        report.write_checks(reports, failures, several=several)
    return max([int(not one.ok) for one in reports] + [error.exit_code for _, error in failures])


def _validated(
    scenario: Scenario, backend: Backend, capabilities: Capabilities, options: argparse.Namespace, *, how: RunOptions
) -> report.CheckReport:
    kept = [Path(options.save) / f"{scenario.name}.{what}.json" for what in ("predicted", "measured")] if options.save else []
    for place in kept:
        places.require(place, option="--save", apart_from=_read(options.scenarios, scenario), kind="a Run")
    _warned(scenario)
    with report.progress(f"{scenario.name}: for real on {backend.name}"), keeping_what_there_is(kept[-1] if kept else None):
        measured = observed(backend, capabilities, scenario, how)
    if measured.interpreter == "simulator":
        found = "one of the simulator, which would be compared with itself"
        raise backends.BackendError(where=f"backend {backend.name}", expected="a Run that was measured", found=found)
    predicted = prediction(scenario, measured, capabilities)
    checks = compare.compare(predicted, measured)
    for run, place in zip((predicted, measured), kept, strict=False):
        saved.save(run, place)
    return report.of_checks(checks, predicted, measured, replaced=_replaced(scenario, capabilities))


def _warned(scenario: Scenario) -> tuple[str, ...]:
    """What to know before one runs `scenario`, said on standard error."""
    warnings = cautions.cautions(scenario)
    report.warn(scenario.name, warnings)
    return warnings


@contextmanager
def keeping_what_there_is(place: Path | None) -> Iterator[None]:
    """When a rank fails inside, save what the ranks had ended, marked incomplete, and say where."""
    try:
        yield
    except IncompleteRunError as error:
        ended = sum("first" in rank.phases for rank in error.run.ranks)
        error.remedy = f"{ended} of {error.run.world_size} ranks had ended their first step; --save keeps what there is"
        if place:
            try:
                saved.save(error.run, place)
                error.remedy = f"what the ranks had ended until then is in {place}, marked incomplete"
            except places.PlaceError as unsaved:
                error.remedy = f"what the ranks had ended until then could not be saved: {unsaved}"
        raise


def observed(backend: Backend, capabilities: Capabilities, scenario: Scenario, how: RunOptions) -> Run:
    """The Run of `scenario` on `backend`, with what the backend can see in its provenance."""
    outside = [rank for rank in how.ranks or () if rank >= scenario.world_size]
    if outside:
        expected = f"ranks 0 to {scenario.world_size - 1} of {scenario.name}"
        raise UsageError(where="--ranks", expected=expected, found=str(outside[0]))
    found = backends.ask(backend, scenario, options=how)
    senses = (("memory", capabilities.memory), ("numerics", capabilities.numerics), ("time", capabilities.time))
    sees = " ".join(name for name, there in senses if there)
    laws.require_lawful(found, where=scenario.name)
    return replace(found, provenance={**found.provenance, "sees": sees})


def prediction(scenario: Scenario, measured: Run, capabilities: Capabilities) -> Run:
    """The same scenario simulated for the device of the real backend, unfolded for the ranks that were observed."""
    simulator = backends.SimBackend(device=capabilities.device)
    ranks = tuple(rank.rank for rank in measured.ranks)
    return observed(simulator, simulator.capabilities(), scenario, RunOptions(ranks=ranks))


def _replaced(scenario: Scenario, capabilities: Capabilities) -> str:
    if scenario.cluster.kind == capabilities.device:
        return ""
    return f"{scenario.cluster.name} replaced by {capabilities.device} devices of this machine, planned again for them"


def _how(options: argparse.Namespace) -> RunOptions:
    if options.ranks is not None and options.all_ranks:
        found = f"--ranks {','.join(map(str, options.ranks))} with --all-ranks"
        raise UsageError(where="--ranks", expected="some ranks or all of them", found=found, remedy="leave one of the two out")
    return RunOptions(
        ranks=options.ranks,
        all_ranks=options.all_ranks,
        interpreter=options.interpreter,
        timeout_s=options.timeout,
    )


def _place(target: str, scenario: Scenario, several: bool, suffix: str) -> Path:
    return Path(target) / f"{scenario.name}{suffix}" if several or Path(target).is_dir() else Path(target)


def compare_saved(options: argparse.Namespace) -> int:
    """`zsim compare`: 0 when every check that can be made is fine."""
    predicted, measured = saved.load(Path(options.predicted)), saved.load(Path(options.measured))
    for path, run in ((options.predicted, predicted), (options.measured, measured)):
        laws.require_lawful(run, where=path, remedy="the file was changed, or the backend that wrote it has a defect")
    checks = compare.compare(predicted, measured)
    one = report.of_checks(checks, predicted, measured)
    if options.json:
        report.write_checks([one], [], several=False)
    else:
        report.print_checks(one)
    return 0 if one.ok else 1


def show(options: argparse.Namespace) -> int:
    """`zsim show`: the mesh, and the Program or the memory when asked for; `--snapshot` writes the allocator's history."""
    scenario = _with_allocator(load(options.scenario), options)
    program = plan.plan(scenario, device=scenario.cluster.kind)
    head = report.show_head(scenario, program)
    warnings = _warned(scenario)
    found = answer.answer(program, scenario.cluster, expandable_segments=scenario.expandable_segments)
    stages = waterfall.waterfall(scenario, found)
    ridge = answer.ridges(program.of_rank(found.rank), found.phase) if options.memory else ()
    helps = _advice(scenario) if options.memory else ()
    if options.snapshot:
        taken = _read([options.scenario], scenario)
        places.require(Path(options.snapshot), option="--snapshot", apart_from=taken, kind="a snapshot")
        snapshot.write_snapshot(
            program.of_rank(found.rank),
            Path(options.snapshot),
            expandable_segments=scenario.expandable_segments,
            workspace_bytes=_workspace(scenario),
        )
    if options.json:
        more: dict[str, object] = {"program": str(program).splitlines()} if options.program else {}
        more |= {"warnings": list(warnings)} if warnings else {}
        if options.memory:
            more |= memory_report.answer_object(found, stages, ridge)
            more["what_would_help"] = [asdict(effect) | {"finding": memory_report.finding(effect)} for effect in helps]
        if options.time:
            more["time"] = time_report.as_object(scenario, program)
        report.write_json({"schema_version": SCHEMA_VERSION, **head, **more})
        return 0
    rows = [*list(head.items())[1:], ("memory", f"{found.verdict}: {memory_report.verdict_words(found)}")]
    report.table(scenario.name, rows)
    if options.program:
        report.say(str(program))
    if options.memory:
        memory_report.print_answer(found, stages, ridge)
        memory_report.print_advice(helps)
    if options.time:
        time_report.show(scenario, program)
    return 0


def _advice(scenario: Scenario) -> tuple[advice.Effect, ...]:
    """What would help; nothing, and a warning, where trying it would take minutes."""
    if untried := scenario.work.problem(part=MANY_TIMES):
        report.warn(scenario.name, [f"what would help is not computed, to be done in seconds: {untried}"])
        return ()
    with report.progress(f"{scenario.name}: every change planned and simulated"):
        return advice.advice(scenario)


def _with_allocator(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """The scenario with what the command line says of the allocator."""
    return replace(scenario, expandable_segments=scenario.expandable_segments or options.expandable_segments)


def _workspace(scenario: Scenario) -> int:
    return outside.cublas_workspace(scenario.cluster.device) if scenario.cluster.kind == "cuda" else 0


def least(options: argparse.Namespace) -> int:
    """`zsim fit`: 0 when something fits."""
    scenario = _with_allocator(load(options.scenario), options)
    if problem := scenario.work.problem(part=MANY_TIMES):
        raise ScenarioError((f"{options.scenario}: too much to simulate for each stage: {problem}",))
    with report.progress(f"{scenario.name}: every stage on {scenario.cluster.name}"):
        found = fit.fit(scenario)
    memory_report.print_fit(scenario.name, found, as_json=options.json)
    return 0 if found.recommended is not None else 1


def listing(options: argparse.Namespace) -> int:
    """`zsim list`: names, one per line, with a word on each."""
    rows = list(LISTINGS[options.what]())
    if not rows:
        expected = "a folder called scenarios with .toml files in this directory"
        raise UsageError(where="zsim list scenarios", expected=expected, found="none", remedy="the project's checkout has one")
    report.print_list(options.what, rows, as_json=options.json)
    return 0


Row = tuple[str, str]


def _scenarios() -> Iterator[Row]:
    for path in sorted(Path("scenarios").rglob("*.toml")):
        try:
            yield str(path), load(path).description
        except ScenarioError as error:
            yield str(path), f"not usable: {error.problems[0]}"


def _models() -> Iterator[Row]:
    from zsim import models  # only `zsim list models` needs the sources

    for name in models.presets():
        yield name, f"{models.load_preset(name).num_parameters:,} parameters; {models.preset(name).source}"


def _clusters() -> Iterator[Row]:
    from zsim import hardware

    for name in hardware.clusters():
        yield name, hardware.load_cluster(name).description


def _strategies() -> Iterator[Row]:
    from zsim.schema import strategy_table
    from zsim.strategies import STRATEGIES

    for name in STRATEGIES:
        yield name, ", ".join(key for key in strategy_table(name).model_fields if key != "name")


def _backends() -> Iterator[Row]:
    yield from backends.names().items()


def _schema() -> Iterator[Row]:
    yield "schema", ""


LISTINGS: dict[str, Callable[[], Iterator[Row]]] = {
    "scenarios": _scenarios,
    "models": _models,
    "clusters": _clusters,
    "strategies": _strategies,
    "backends": _backends,
    "schema": _schema,
}

COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run,
    "validate": validate,
    "compare": compare_saved,
    "show": show,
    "fit": least,
    "list": listing,
    "accuracy": accuracy_commands.show,
    "calibrate": calibrate_commands.calibrated,
}
