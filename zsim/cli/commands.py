"""What the commands of `zsim` do: load scenarios, call backends, compare, and hand the result to
the report.

Commands that need much that others do not stand in files of their own, which are imported when they
are called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from zsim.cli import report
from zsim.cli.inputs import UsageError, load_all, read, warned
from zsim.errors import ZsimError
from zsim.io import files
from zsim.ir import run_laws
from zsim.ir.run import IncompleteRunError, Run
from zsim.runs import chrome_trace, registry, saved
from zsim.runs.backend import Backend, Capabilities, RunOptions
from zsim.runs.compare import compare
from zsim.scenario.scenario import Scenario


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
    scenarios = load_all(options.scenarios)
    if options.save or options.trace:
        _require_distinct(scenarios)
    backend = registry.find(options.backend)
    how, several = _how(options), len(scenarios) > 1 or len(options.scenarios) > 1
    capabilities = registry.capabilities(backend)
    if options.trace and not capabilities.time:
        expected = "a backend that sees time, as sim does"
        raise UsageError(
            where="--trace", expected=expected, found=f"{backend.name}, whose trace would be empty"
        )
    if backend.name == registry.SimBackend.name and options.interpreter:
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
    traced_to = (
        _place(options.trace, scenario, several, ".trace.json.gz") if options.trace else None
    )
    taken = read(options.scenarios, scenario)
    for option, kind, target in (("--save", "a Run", place), ("--trace", "a trace", traced_to)):
        if target:
            files.require(target, option=option, apart_from=taken, kind=kind)
            taken += (target,)
    warnings = warned(scenario)
    with report.progress(f"{scenario.name} on {backend.name}"), keeping_what_there_is(place):
        found = observed(backend, capabilities, scenario, how)
    if place:
        saved.save(found, place)
    if traced_to:
        chrome_trace.write(found, traced_to)
    return report.of_run(found, scenario, warnings=warnings)


def validate(options: argparse.Namespace) -> int:
    """`zsim validate`: 0 when every check that can be made is fine. Of several scenarios one that
    cannot run stops no other."""
    scenarios, how = load_all(options.scenarios), _how(options)
    if options.save:
        _require_distinct(scenarios)
    backend = registry.find(options.against)
    if backend.name == registry.SimBackend.name:
        raise UsageError(
            where="--against", expected="a backend that runs for real", found=backend.name
        )
    capabilities, several = (
        registry.capabilities(backend), len(scenarios) > 1 or len(options.scenarios) > 1,
    )
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
    scenario: Scenario, backend: Backend, capabilities: Capabilities, options: argparse.Namespace,
    *, how: RunOptions,
) -> report.CheckReport:
    kept = (
        [Path(options.save) / f"{scenario.name}.{what}.json" for what in ("predicted", "measured")]
        if options.save
        else []
    )
    for place in kept:
        files.require(
            place, option="--save", apart_from=read(options.scenarios, scenario), kind="a Run"
        )
    warned(scenario)
    with (
        report.progress(f"{scenario.name}: for real on {backend.name}"),
        keeping_what_there_is(kept[-1] if kept else None),
    ):
        measured = observed(backend, capabilities, scenario, how)
    if measured.interpreter == "simulator":
        found = "one of the simulator, which would be compared with itself"
        raise registry.BackendError(
            where=f"backend {backend.name}", expected="a Run that was measured", found=found
        )
    predicted = prediction(scenario, measured, capabilities)
    checks = compare.compare(predicted, measured)
    for run, place in zip((predicted, measured), kept, strict=False):
        saved.save(run, place)
    return report.of_checks(checks, predicted, measured, replaced=_replaced(scenario, capabilities))


@contextmanager
def keeping_what_there_is(place: Path | None) -> Iterator[None]:
    """When a rank fails inside, save what the ranks had ended, if anything, marked incomplete, and
    say where."""
    try:
        yield
    except IncompleteRunError as error:
        if any(rank.phases for rank in error.run.ranks):
            error.remedy = "; ".join(
                [*([error.remedy] if error.remedy else []), _kept(error.run, place)]
            )
        raise


def _kept(run: Run, place: Path | None) -> str:
    """Save what ranks had ended, if there is a place for it, and say so."""
    if not place:
        ended = sum("first" in rank.phases for rank in run.ranks)
        return (
            f"{ended} of {run.world_size} ranks had ended their first step; --save keeps what "
            f"there is"
        )
    try:
        saved.save(run, place)
    except files.PlaceError as unsaved:
        return f"what the ranks had ended until then could not be saved: {unsaved}"
    return f"what the ranks had ended until then is in {place}, marked incomplete"


def observed(
    backend: Backend, capabilities: Capabilities, scenario: Scenario, how: RunOptions
) -> Run:
    """The Run of `scenario` on `backend`, with what the backend can see in its provenance."""
    outside = [rank for rank in how.ranks or () if rank >= scenario.world_size]
    if outside:
        expected = f"ranks 0 to {scenario.world_size - 1} of {scenario.name}"
        raise UsageError(where="--ranks", expected=expected, found=str(outside[0]))
    found = registry.ask(backend, scenario, options=how)
    senses = (
        ("memory", capabilities.memory), ("numerics", capabilities.numerics),
        ("time", capabilities.time),
    )
    sees = " ".join(name for name, there in senses if there)
    run_laws.require_lawful(found, where=scenario.name)
    return replace(found, provenance={**found.provenance, "sees": sees})


def prediction(scenario: Scenario, measured: Run, capabilities: Capabilities) -> Run:
    """The same scenario simulated for the device of the real backend, unfolded for the ranks that
    were observed."""
    simulator = registry.SimBackend(device=capabilities.device)
    ranks = tuple(rank.rank for rank in measured.ranks)
    return observed(simulator, simulator.capabilities(), scenario, RunOptions(ranks=ranks))


def _replaced(scenario: Scenario, capabilities: Capabilities) -> str:
    if scenario.cluster.kind == capabilities.device:
        return ""
    return (
        f"{scenario.cluster.name} replaced by {capabilities.device} devices of this machine, "
        f"planned again for them"
    )


def _how(options: argparse.Namespace) -> RunOptions:
    if options.ranks is not None and options.all_ranks:
        found = f"--ranks {','.join(map(str, options.ranks))} with --all-ranks"
        raise UsageError(
            where="--ranks", expected="some ranks or all of them", found=found,
            remedy="leave one of the two out",
        )
    return RunOptions(
        ranks=options.ranks,
        all_ranks=options.all_ranks,
        interpreter=options.interpreter,
        timeout_s=options.timeout,
    )


def _place(target: str, scenario: Scenario, several: bool, suffix: str) -> Path:
    return (
        Path(target) / f"{scenario.name}{suffix}"
        if several or Path(target).is_dir()
        else Path(target)
    )


def compare_saved(options: argparse.Namespace) -> int:
    """`zsim compare`: 0 when every check that can be made is fine."""
    predicted, measured = saved.load(Path(options.predicted)), saved.load(Path(options.measured))
    for path, run in ((options.predicted, predicted), (options.measured, measured)):
        run_laws.require_lawful(run, where=path, remedy="the file was changed, or the backend "
                                                        "that wrote it has a defect")
    checks = compare.compare(predicted, measured)
    one = report.of_checks(checks, predicted, measured)
    if options.json:
        report.write_checks([one], [], several=False)
    else:
        report.print_checks(one)
    return 0 if one.ok else 1


def show(options: argparse.Namespace) -> int:
    """`zsim show`."""
    from zsim.cli import show as show_commands

    return show_commands.show(options)


def least(options: argparse.Namespace) -> int:
    """`zsim fit`."""
    from zsim.cli import show as show_commands

    return show_commands.least(options)


def listing(options: argparse.Namespace) -> int:
    """`zsim list`."""
    from zsim.cli import show as show_commands

    return show_commands.listing(options)


def accuracy(options: argparse.Namespace) -> int:
    """`zsim accuracy`."""
    from zsim.cli import accuracy as accuracy_commands

    return accuracy_commands.show(options)


def calibrate(options: argparse.Namespace) -> int:
    """`zsim calibrate`."""
    from zsim.cli import calibrate as calibrate_commands

    return calibrate_commands.calibrated(options)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run,
    "validate": validate,
    "compare": compare_saved,
    "show": show,
    "fit": least,
    "list": listing,
    "accuracy": accuracy,
    "calibrate": calibrate,
}
