"""The commands run, validate and compare: load scenarios, call `zsim.api`, hand the result to the
report.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from zsim import api
from zsim.cli import terminal
from zsim.cli.inputs import UsageError, load_all, read, warned
from zsim.cli.reports import run_report
from zsim.errors import ZsimError
from zsim.io import files
from zsim.ir.run import (
    SCHEMA_VERSION,
    IncompleteRunError,
    InterruptedRunError,
    RunRecord,
    UnendedRunError,
)
from zsim.runs import registry, saved, unended
from zsim.runs.backend import Backend, Capabilities, RunOptions
from zsim.runs.pictures import chrome_trace
from zsim.runs.pictures.trace_notes import TraceNotes
from zsim.runs.run import Comparison, Run
from zsim.runs.unended import UnendedRun
from zsim.scenario.scenario import Scenario

Failure = tuple[str, ZsimError]
"""A scenario's name, and why it could not run."""


def _require_distinct(scenarios: tuple[Scenario, ...]) -> None:
    """Files are named by scenario, so each needs a name of its own."""
    names = [scenario.name for scenario in scenarios]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            where="--save, --trace", expected="scenarios of different names",
            found=f"several called {twice[0]}",
        )


def run(options: argparse.Namespace) -> int:
    """`zsim run`: 0 when every expectation held. Of several scenarios one that cannot run stops no
    other."""
    scenarios = _in_detail(load_all(options.scenarios), options)
    if options.seeds is not None:
        from zsim.cli.commands import seeds  # start-up: few runs are over seeds

        return seeds.run(scenarios, options)
    if options.save or options.trace:
        _require_distinct(scenarios)
    how, several = _how(options), len(scenarios) > 1 or len(options.scenarios) > 1
    backend, capabilities = api.open_backend(options.backend, how)
    _require_spans(backend, capabilities, options)
    _require_results(scenarios, options, several=several)
    runs: list[Run | UnendedRun] = []
    failures: list[Failure] = []
    for count, scenario in terminal.countdown(scenarios):
        try:
            runs.append(_run(
                scenario, backend, capabilities, options, how=how, several=several, count=count
            ))
        except ZsimError as error:
            if step := unended.expected(scenario, error, backend=backend.name):
                runs.append(step)
                _note_no_trace(scenario, options)
                continue
            _note(failures, scenario, error, several=several)
    run_report.print_runs(
        runs, failures, as_json=options.json, several=several, exact=options.verbose
    )
    return _exit_code(runs, failures)


def _in_detail(
    scenarios: tuple[Scenario, ...], options: argparse.Namespace
) -> tuple[Scenario, ...]:
    """The scenarios with the detail of --detail in place of their own, where it is given."""
    if options.detail is None:
        return scenarios
    if options.backend != registry.SimBackend.name:
        raise UsageError(
            where="--detail", expected=f"--backend {registry.SimBackend.name}, which simulates",
            found=options.backend[:60],
        )
    detail = {"detail": options.detail}
    return tuple([scenario.with_(execution=detail) for scenario in scenarios])


def _require_spans(
    backend: Backend, capabilities: Capabilities, options: argparse.Namespace
) -> None:
    if options.trace and not (capabilities.time or capabilities.spans):
        expected = "a backend that records time, as sim and gloo do"
        raise UsageError(
            where="--trace", expected=expected, found=f"{backend.name}, whose trace would be empty"
        )


def _note_no_trace(scenario: Scenario, options: argparse.Namespace) -> None:
    """Say that there is no trace of a step that does not end, where one is asked for."""
    if options.trace:
        terminal.note(f"{scenario.name}: no trace is written, as the step does not end")


def _note(
    failures: list[Failure], scenario: Scenario, error: ZsimError, *, several: bool
) -> None:
    """Keep the error of one scenario of several, and print it; raise that of a single one."""
    if not several:
        raise error
    failures.append((scenario.name, error))
    run_report.print_failure(scenario.name, error)


def _exit_code(
    results: Sequence[Run | UnendedRun] | Sequence[Comparison], failures: Sequence[Failure]
) -> int:
    codes = [int(not result.ok) for result in results]
    return max([*codes, *(error.exit_code for _, error in failures)])


def _run(
    scenario: Scenario,
    backend: Backend,
    capabilities: Capabilities,
    options: argparse.Namespace,
    *,
    how: RunOptions,
    several: bool,
    count: str,
) -> Run:
    target, trace = _results(scenario, options, several=several)
    scenario = api.of_module(backend, scenario, how)
    warnings = warned(scenario)
    with (
        terminal.progress(f"{count}{scenario.name} on {backend.name}"),
        keeping_what_there_is(target),
    ):
        record = api.observed(backend, capabilities, scenario, how)
    _note_whole(scenario, record)
    if target:
        saved.save(api.with_caches(scenario, record, scenario.cluster), target)
        terminal.wrote(target)
    if trace:
        chrome_trace.write(record, trace, notes=_trace_notes(scenario, record))
        terminal.wrote(trace, "; open it in ui.perfetto.dev")
    needs = api.device_memory(scenario, record)
    return Run(record=record, scenario=scenario, warnings=warnings, device_memory=needs)


def _trace_notes(scenario: Scenario, record: RunRecord) -> TraceNotes | None:
    """Reasons, memory by kind and rates of links for the trace of a simulated Run."""
    if record.interpreter != "simulator":
        return None
    from zsim.report.simulation_notes import trace_notes  # start-up: few runs write a trace

    return trace_notes(scenario, record)


def _results(
    scenario: Scenario, options: argparse.Namespace, *, several: bool
) -> tuple[Path | None, Path | None]:
    """The files of the scenario's Run and trace, where they are asked for."""
    return (
        _target(options.save, scenario, several, ".json") if options.save else None,
        _target(options.trace, scenario, several, ".trace.json.gz") if options.trace else None,
    )


def _require_results(
    scenarios: Sequence[Scenario], options: argparse.Namespace, *, several: bool
) -> None:
    """PlaceError, before anything runs, for the first result that cannot be written."""
    if not (options.save or options.trace):
        return
    for scenario in scenarios:
        target, trace = _results(scenario, options, several=several)
        taken = read(options.scenarios, scenario)
        for option, kind, path in (("--save", "a Run", target), ("--trace", "a trace", trace)):
            if path:
                files.require(path, option=option, apart_from=taken, kind=kind)
                taken += (path,)
        if trace:
            chrome_trace.require(trace)


def validate(options: argparse.Namespace) -> int:
    """`zsim validate`: 0 when every check that can be made is fine. Of several scenarios one that
    cannot run stops no other."""
    scenarios, how = load_all(options.scenarios), _how(options)
    if options.save:
        _require_distinct(scenarios)
    backend, capabilities = _real(options, how)
    _require_spans(backend, capabilities, options)
    several = len(scenarios) > 1 or len(options.scenarios) > 1
    if options.junit:
        files.require(Path(options.junit), option="--junit", kind="a report")
    if options.trace:
        _require_distinct(scenarios)
    for scenario in scenarios:
        taken = read(options.scenarios, scenario)
        for path in _sides(scenario, options):
            files.require(path, option="--save", apart_from=taken, kind="a Run")
        if options.trace:
            path = _target(options.trace, scenario, several, ".trace.json.gz")
            files.require(path, option="--trace", apart_from=taken, kind="a trace")
            chrome_trace.require(path)
    comparisons: list[Comparison] = []
    failures: list[Failure] = []
    for count, scenario in terminal.countdown(scenarios):
        try:
            scenario = api.of_module(backend, scenario, how)
            comparisons.append(
                _validated(scenario, backend, capabilities, options, how=how, count=count)
            )
            if not options.json:
                run_report.print_checks(comparisons[-1], exact=options.verbose)
            _save_sides(comparisons[-1], scenario, options)
            _overlay(comparisons[-1], scenario, options, several=several)
        except ZsimError as error:
            if not several:
                _write_junit(options, comparisons, [(scenario.name, error)])
            _note(failures, scenario, error, several=several)
    if options.json:
        run_report.write_checks(comparisons, failures, several=several)
    _write_junit(options, comparisons, failures)
    return _exit_code(comparisons, failures)


def _write_junit(
    options: argparse.Namespace, comparisons: Sequence[Comparison], failures: Sequence[Failure]
) -> None:
    """Write the JUnit report, where it is asked for."""
    if options.junit:
        from zsim.cli.reports import junit  # start-up: few commands write XML

        junit.write(Path(options.junit), comparisons, failures)
        terminal.wrote(options.junit)


def _real(options: argparse.Namespace, how: RunOptions) -> tuple[Backend, Capabilities]:
    """The real backend: on ranks of this machine, or on those that --launch starts."""
    against = options.against or api.REAL_BACKENDS[options.device or "cpu"]
    if options.launch is None:
        return api.open_real_backend(against, how)
    from zsim.runs.launch.launched import LaunchedBackend  # start-up: few commands launch anything

    devices = {name: device for device, name in api.REAL_BACKENDS.items()}
    if against not in devices:
        raise UsageError(where="--launch", expected="--against gloo or nccl", found=against)
    if options.device not in (None, devices[against]):
        raise UsageError(
            where="--device", expected=f"{devices[against]}, where {against} runs",
            found=options.device, remedy=f"--against {api.REAL_BACKENDS[options.device]}",
        )
    if not options.save:
        raise UsageError(
            where="--launch", expected="--save FOLDER, which all nodes see", found="none"
        )
    if options.testbed:
        raise UsageError(
            where="--launch", expected="no --testbed", found="both",
            remedy="--testbed starts ranks on this machine",
        )
    if options.compute == "emulated":
        raise UsageError(
            where="--launch", expected="--compute real", found="emulated",
            remedy="timers run in ranks of this machine",
        )
    backend = LaunchedBackend(
        name=against, device=devices[against], launch=options.launch,
        folder=Path(options.save), queue_s=options.queue_timeout,
    )
    return backend, backend.capabilities()


def _validated(
    scenario: Scenario, backend: Backend, capabilities: Capabilities, options: argparse.Namespace,
    *, how: RunOptions, count: str,
) -> Comparison:
    targets = _sides(scenario, options)
    warned(scenario)
    machine = api.machine_of(capabilities, scenario, options.cluster) or _measured_now(
        scenario, backend, capabilities, options
    )
    cluster = api.machine_cluster(scenario, machine)
    shaping = options.testbed and terminal.progress(
        f"{scenario.name}: links of {options.testbed.text}"
    )
    with shaping or nullcontext():
        cluster, how = api.shaped(
            backend, scenario, cluster, how, testbed=options.testbed, compute=options.compute
        )
    with (
        terminal.progress(f"{count}{scenario.name}: for real on {backend.name}"),
        keeping_what_there_is(targets[-1] if targets else None),
    ):
        measured = api.measured(backend, capabilities, scenario, how)
    if folder := measured.provenance.get("resumed"):
        terminal.note(f"{scenario.name}: the ranks' results are taken from {folder}; delete it to "
                    f"run them again")
    _note_whole(scenario, measured)
    return api.validated(
        scenario, measured, capabilities, required=options.require, cluster=cluster
    )


def _save_sides(
    comparison: Comparison, scenario: Scenario, options: argparse.Namespace
) -> None:
    """Write both Runs, where that is asked for; the verdict is out already, if a disk is full."""
    records = comparison.predicted, comparison.measured
    for record, path in zip(records, _sides(scenario, options), strict=False):
        saved.save(record, path)
        terminal.wrote(path)


def _note_whole(scenario: Scenario, record: RunRecord) -> None:
    """Say that the user's own module is not built unit by unit, and why."""
    if reason := record.provenance.get("built_whole"):
        terminal.note(f"{scenario.name}: each rank builds the whole module, as {reason}")


def _overlay(
    comparison: Comparison, scenario: Scenario, options: argparse.Namespace, *, several: bool
) -> None:
    """Write both sides' spans into one trace, where that is asked for."""
    if not (comparison.predicted.complete or comparison.measured.complete):
        _note_no_trace(scenario, options)
    elif options.trace:
        path = _target(options.trace, scenario, several, ".trace.json.gz")
        chrome_trace.write(comparison.predicted, path, measured=comparison.measured)
        terminal.wrote(path, "; open it in ui.perfetto.dev")


def _sides(scenario: Scenario, options: argparse.Namespace) -> list[Path]:
    """The files of the scenario's two Runs, where they are asked for."""
    if not options.save:
        return []
    return [
        Path(options.save) / f"{scenario.name}.{side}.json" for side in ("predicted", "measured")
    ]


def _measured_now(
    scenario: Scenario, backend: Backend, capabilities: Capabilities, options: argparse.Namespace
) -> Path | None:
    """The file of this machine, which real ranks of a CPU measure at its first use; None where
    their time does not depend on it, or where the user does not want it.

    GPUs are not measured unasked, since their presets are published figures.
    """
    # start-up: few commands measure anything
    from zsim.cli.commands.calibration import calibrate_here

    if capabilities.gpus and (reason := api.not_of_gpus(capabilities.gpus, scenario)):
        terminal.note(f"{scenario.name}: times are those of a preset, not of this machine's GPUs: "
                    f"{reason}")
    able = capabilities.device == "cpu" and hasattr(backend, "measure")
    wanted = not options.no_calibrate and not os.environ.get(calibrate_here.OFF)
    if not able or not wanted or options.compute == "emulated":
        return None
    return calibrate_here.at_first_use(backend, scenario.world_size)


@contextmanager
def keeping_what_there_is(target: Path | None) -> Iterator[None]:
    """Save what the ranks had ended when one fails inside, if anything, marked incomplete; the
    error's remedy says where."""
    try:
        yield
    except (IncompleteRunError, UnendedRunError) as error:
        ran = isinstance(error, IncompleteRunError)  # what is simulated is there again at once
        if any(rank.phases for rank in error.run.ranks) and (target or ran):
            error.remedy = "; ".join(filter(None, (error.remedy, _kept(error.run, target))))
        raise
    except InterruptedRunError as stop:
        if stop.run and any(rank.phases for rank in stop.run.ranks):
            terminal.note(_kept(stop.run, target))
        raise


def _kept(run: RunRecord, target: Path | None) -> str:
    """Save what ranks had ended to `target`, if there is one; returns a sentence about it."""
    if not target:
        ended = sum(rank.stands_for for rank in run.ranks if "first" in rank.phases)
        return (
            f"{ended} of {run.world_size} ranks had ended their first step; --save keeps what "
            f"there is"
        )
    try:
        saved.save(run, target)
    except files.PlaceError as unsaved:
        return f"what the ranks had ended until then could not be saved: {unsaved}"
    return f"what the ranks had ended until then is in {target}, marked incomplete"


def _how(options: argparse.Namespace) -> RunOptions:
    return RunOptions(
        ranks=options.ranks,
        all_ranks=options.all_ranks,
        interpreter=options.interpreter,
        timeout_s=options.timeout,
        module=options.module,
        numerics=options.numerics,
        device=options.device,
        hops=bool(options.trace),
        progress=terminal.tell,
    )


def _target(target: str, scenario: Scenario, several: bool, suffix: str) -> Path:
    return (
        Path(target) / f"{scenario.name}{suffix}"
        if several or Path(target).is_dir()
        else Path(target)
    )


def compare_saved(options: argparse.Namespace) -> int:
    """`zsim compare`: 0 when every check that can be made is fine. Simulations of two scenarios are
    no such checks: their figures are set side by side."""
    for name in (options.predicted, options.measured):
        if name.endswith(".toml"):
            raise UsageError(
                where=name, expected="a saved Run", found="a scenario",
                remedy="`zsim diff` compares two scenarios, `zsim run --save` writes a Run",
            )
    comparison = api.compare(options.predicted, options.measured, require=options.require)
    if comparison.of_two_scenarios and not options.require:
        return _side_by_side(comparison, options)
    if options.json:
        run_report.write_checks([comparison], [], several=False)
    else:
        run_report.print_checks(comparison, exact=options.verbose)
    return 0 if comparison.ok else 1


def _side_by_side(comparison: Comparison, options: argparse.Namespace) -> int:
    from zsim.analysis.difference import record_changes  # start-up: few Runs are such
    from zsim.cli.commands.diff import say_figures

    figures = tuple(record_changes(comparison.predicted, comparison.measured))
    if options.json:
        terminal.write_json({
            "schema_version": SCHEMA_VERSION, "base": comparison.predicted.scenario,
            "head": comparison.measured.scenario, "figures": [each.to_dict() for each in figures],
            "ok": True,
        })
    else:
        head, *_ = str(comparison).splitlines()
        terminal.say_wrapped(head, hanging=2)
        terminal.say_wrapped(f"  not the same {comparison.checks[0].detail}", hanging=4)
        say_figures(figures)
    return 0
