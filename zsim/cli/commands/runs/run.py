"""`zsim run`: scenarios on a backend, with the Runs and traces that are asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zsim import api
from zsim.analysis.simulated_step import add_caches, device_memory
from zsim.cli import outputs, terminal
from zsim.cli.commands.runs.kept_runs import (
    keeping_unended,
    note_no_trace,
    require_distinct,
    require_spans,
    target_of,
)
from zsim.cli.commands.runs.several import (
    Failure,
    exit_code,
    note_failure,
    note_whole,
    options_of_run,
)
from zsim.cli.inputs import UsageError, load_all, read, warned
from zsim.cli.reports import run_report
from zsim.errors import ZsimError
from zsim.ir.run import RunRecord
from zsim.runs import real_run, registry, saved, unended
from zsim.runs.backend import Backend, Capabilities, RunOptions
from zsim.runs.pictures import chrome_trace
from zsim.runs.pictures.trace_notes import TraceNotes
from zsim.runs.run import Run
from zsim.runs.unended import UnendedRun
from zsim.scenario.scenario import Scenario


def run(options: argparse.Namespace) -> int:
    """`zsim run`: 0 when every expectation held. Of several scenarios one that cannot run stops no
    other."""
    scenarios = _in_detail(load_all(options.scenarios), options)
    if options.seeds is not None:
        from zsim.cli.commands.runs.seeds import run_seeds  # start-up: few runs are over seeds

        return run_seeds(scenarios, options)
    if options.save or options.trace:
        require_distinct(scenarios)
    how, several = options_of_run(options), len(scenarios) > 1 or len(options.scenarios) > 1
    backend, capabilities = api.open_backend(options.backend, how)
    require_spans(backend, capabilities, options)
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
                note_no_trace(scenario, options)
                continue
            note_failure(failures, scenario, error, several=several)
    run_report.print_runs(
        runs, failures, as_json=options.json, several=several, exact=options.verbose
    )
    return exit_code(runs, failures)


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
    scenario = real_run.with_module(backend, scenario, how)
    warnings = warned(scenario)
    with (
        terminal.progress(f"{count}{scenario.name} on {backend.name}"),
        keeping_unended(target),
    ):
        record = real_run.observe(backend, capabilities, scenario, how)
    note_whole(scenario, record)
    if target:
        saved.save(add_caches(scenario, record, scenario.cluster), target)
        terminal.wrote(target)
    if trace:
        chrome_trace.write(record, trace, notes=_trace_notes(scenario, record))
        terminal.wrote(trace, "; open it in ui.perfetto.dev")
    needs = device_memory(scenario, record, backend)
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
        target_of(options.save, scenario, several, ".json") if options.save else None,
        target_of(options.trace, scenario, several, ".trace.json.gz") if options.trace else None,
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
                outputs.require(path, option=option, apart_from=taken, kind=kind)
                taken += (path,)
        if trace:
            chrome_trace.require(trace)
