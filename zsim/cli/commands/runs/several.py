"""Parts that run and validate share: options of the backend, and scenarios that cannot run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zsim.cli import terminal
from zsim.cli.reports import run_report
from zsim.errors import ZsimError
from zsim.ir.run import RunRecord
from zsim.runs.backend import RunOptions
from zsim.runs.comparison import Comparison
from zsim.runs.run import Run
from zsim.runs.unended import UnendedRun
from zsim.scenario.scenario import Scenario

Failure = tuple[str, ZsimError]
"""A scenario's name, and why it could not run."""


def options_of_run(options: argparse.Namespace) -> RunOptions:
    """Options of the command line for the backend."""
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


def note_failure(
    failures: list[Failure], scenario: Scenario, error: ZsimError, *, several: bool
) -> None:
    """Keep the error of one scenario of several, and print it; raise that of a single one."""
    if not several:
        raise error
    failures.append((scenario.name, error))
    run_report.print_failure(scenario.name, error)


def exit_code(
    results: Sequence[Run | UnendedRun] | Sequence[Comparison], failures: Sequence[Failure]
) -> int:
    """The exit code of the worst: a failure's own, 1 where a verdict failed, else 0."""
    codes = [int(not result.ok) for result in results]
    return max([*codes, *(error.exit_code for _, error in failures)])


def note_whole(scenario: Scenario, record: RunRecord) -> None:
    """Say that the user's own module is not built unit by unit, and why."""
    if reason := record.provenance.get("built_whole"):
        terminal.note(f"{scenario.name}: each rank builds the whole module, as {reason}")
