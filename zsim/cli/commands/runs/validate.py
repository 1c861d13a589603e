"""`zsim validate`: scenarios simulated, run for real, and the two compared."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from zsim import api
from zsim.calibration.machine import choice
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
from zsim.runs import real_run, saved
from zsim.runs.backend import Backend, Capabilities, RunOptions
from zsim.runs.comparison import Comparison
from zsim.runs.pictures import chrome_trace
from zsim.scenario.scenario import Scenario


def run(options: argparse.Namespace) -> int:
    """`zsim validate`: 0 when every check that can be made is fine. Of several scenarios one that
    cannot run stops no other."""
    scenarios, how = load_all(options.scenarios), options_of_run(options)
    if options.save:
        require_distinct(scenarios)
    backend, capabilities = _real(options, how)
    require_spans(backend, capabilities, options)
    several = len(scenarios) > 1 or len(options.scenarios) > 1
    if options.junit:
        outputs.require(Path(options.junit), option="--junit", kind="a report")
    if options.trace:
        require_distinct(scenarios)
    for scenario in scenarios:
        taken = read(options.scenarios, scenario)
        for path in _sides(scenario, options):
            outputs.require(path, option="--save", apart_from=taken, kind="a Run")
        if options.trace:
            path = target_of(options.trace, scenario, several, ".trace.json.gz")
            outputs.require(path, option="--trace", apart_from=taken, kind="a trace")
            chrome_trace.require(path)
    comparisons: list[Comparison] = []
    failures: list[Failure] = []
    for count, scenario in terminal.countdown(scenarios):
        try:
            scenario = real_run.with_module(backend, scenario, how)
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
            note_failure(failures, scenario, error, several=several)
    if options.json:
        run_report.write_checks(comparisons, failures, several=several)
    _write_junit(options, comparisons, failures)
    return exit_code(comparisons, failures)


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
    against = options.against or real_run.REAL_BACKENDS[options.device or "cpu"]
    if options.launch is None:
        return real_run.open_real_backend(against, how)
    from zsim.runs.launch.launched import LaunchedBackend  # start-up: few commands launch anything

    devices = {name: device for device, name in real_run.REAL_BACKENDS.items()}
    if against not in devices:
        raise UsageError(where="--launch", expected="--against gloo or nccl", found=against)
    if options.device not in (None, devices[against]):
        raise UsageError(
            where="--device", expected=f"{devices[against]}, where {against} runs",
            found=options.device, remedy=f"--against {real_run.REAL_BACKENDS[options.device]}",
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
    machine = choice.find_machine(capabilities, scenario, options.cluster) or _measured_now(
        scenario, backend, capabilities, options
    )
    cluster = choice.load_machine(scenario, machine)
    shaping = options.testbed and terminal.progress(
        f"{scenario.name}: links of {options.testbed.text}"
    )
    with shaping or nullcontext():
        cluster, how = choice.shape_links(
            backend, scenario, cluster, how, testbed=options.testbed, compute=options.compute
        )
    with (
        terminal.progress(f"{count}{scenario.name}: for real on {backend.name}"),
        keeping_unended(targets[-1] if targets else None),
    ):
        measured = real_run.measure(backend, capabilities, scenario, how)
    if folder := measured.provenance.get("resumed"):
        terminal.note(f"{scenario.name}: the ranks' results are taken from {folder}; delete it to "
                    f"run them again")
    note_whole(scenario, measured)
    return api.compare_with_simulation(
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


def _overlay(
    comparison: Comparison, scenario: Scenario, options: argparse.Namespace, *, several: bool
) -> None:
    """Write both sides' spans into one trace, where that is asked for."""
    if not (comparison.predicted.complete or comparison.measured.complete):
        note_no_trace(scenario, options)
    elif options.trace:
        path = target_of(options.trace, scenario, several, ".trace.json.gz")
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

    if capabilities.gpus and (reason := choice.reason_for_preset(capabilities.gpus, scenario)):
        terminal.note(f"{scenario.name}: times are those of a preset, not of this machine's GPUs: "
                    f"{reason}")
    able = capabilities.device == "cpu" and hasattr(backend, "measure")
    wanted = not options.no_calibrate and not os.environ.get(calibrate_here.OFF)
    if not able or not wanted or options.compute == "emulated":
        return None
    return calibrate_here.at_first_use(backend, scenario.world_size)
