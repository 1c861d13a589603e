"""Files that run and validate write, for each scenario, and those of a Run that does not end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zsim.cli import terminal
from zsim.cli.inputs import UsageError
from zsim.io import files
from zsim.ir.run import IncompleteRunError, InterruptedRunError, RunRecord, UnendedRunError
from zsim.runs import saved
from zsim.runs.backend import Backend, Capabilities
from zsim.scenario.scenario import Scenario


def require_distinct(scenarios: tuple[Scenario, ...]) -> None:
    """Files are named by scenario, so each needs a name of its own."""
    names = [scenario.name for scenario in scenarios]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            where="--save, --trace", expected="scenarios of different names",
            found=f"several called {twice[0]}",
        )


def require_spans(
    backend: Backend, capabilities: Capabilities, options: argparse.Namespace
) -> None:
    """UsageError where a trace is asked for of a backend that records no time."""
    if options.trace and not (capabilities.time or capabilities.spans):
        expected = "a backend that records time, as sim and gloo do"
        raise UsageError(
            where="--trace", expected=expected, found=f"{backend.name}, whose trace would be empty"
        )


def target_of(target: str, scenario: Scenario, several: bool, suffix: str) -> Path:
    """The file of one scenario's result: `target`, or one in that folder."""
    return (
        Path(target) / f"{scenario.name}{suffix}"
        if several or Path(target).is_dir()
        else Path(target)
    )


def note_no_trace(scenario: Scenario, options: argparse.Namespace) -> None:
    """Note that a step without an end has no trace, where `options` ask for one."""
    if options.trace:
        terminal.note(f"{scenario.name}: no trace is written, as the step does not end")


@contextmanager
def keeping_unended(target: Path | None) -> Iterator[None]:
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
        return f"phases that ranks had ended could not be saved: {unsaved}"
    return f"phases that ranks had ended are in {target}, marked incomplete"
