"""Inputs of commands: scenario files and folders, their scenarios, and warnings about them."""

from __future__ import annotations

import argparse
from pathlib import Path

from zsim.analysis import scenario_warnings
from zsim.cli import terminal
from zsim.errors import ScenarioError, ZsimError
from zsim.scenario.scenario import Scenario, load


class UsageError(ZsimError):
    """Arguments that do not go together."""


def scenario_files(arguments: list[str]) -> tuple[Path, ...]:
    """The files named, and every .toml below a folder that is named, sorted."""
    paths: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        try:
            inside = sorted(path.rglob("*.toml")) if path.is_dir() else [path]
        except (OSError, ValueError) as error:
            raise ScenarioError((f"{argument[:200]!r}: cannot be looked up: "
                                 f"{getattr(error, 'strerror', None) or error}",)) from None
        if not inside:
            raise ScenarioError((f"{path}: expected scenario files in this folder, found none",))
        paths += inside
    return tuple(dict.fromkeys(paths))


def load_one(argument: str) -> Scenario:
    """The scenario in a file; ScenarioError, with the way to import it, for another tool's config.
    """
    try:
        return load(argument)
    except ScenarioError as error:
        if kind := _kind(Path(argument)):
            raise ScenarioError((
                f"{argument}: expected a scenario, found a config of {kind}; `zsim import {kind} "
                f"{argument}` makes one of it",
            )) from None
        raise error


def load_with_options(options: argparse.Namespace) -> Scenario:
    """The scenario, with the own module that the command line names in place of its model."""
    scenario = load_one(options.scenario)
    if options.module is not None:
        # start-up: few bring a module of their own
        from zsim.runs import real_run, registry
        from zsim.runs.backend import RunOptions

        run_options = RunOptions(module=options.module)
        scenario = real_run.with_module(registry.SimBackend(), scenario, run_options)
    return scenario


def _kind(path: Path) -> str | None:
    """The tool whose config a file is, by its content; None for a scenario with mistakes."""
    from zsim.configs.reading import kind_of  # start-up: only where something is wrong

    try:
        return kind_of(path) if path.is_file() else None
    except (OSError, ValueError):
        return None


def load_all(arguments: list[str]) -> tuple[Scenario, ...]:
    """Every scenario; one ScenarioError with the problems of all files that have some."""
    scenarios: list[Scenario] = []
    problems: list[str] = []
    for path in scenario_files(arguments):
        try:
            scenarios.append(load_one(str(path)))
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(tuple(problems))
    return tuple(scenarios)


def read(arguments: list[str], scenario: Scenario) -> tuple[Path, ...]:
    """Every file that is read, which no result may be written over: scenarios, and what `scenario`
    names."""
    return (*scenario_files(arguments), *scenario.files)


def warned(scenario: Scenario) -> tuple[str, ...]:
    """Warnings about `scenario`, printed on standard error."""
    warnings = tuple(caveat.text for caveat in scenario_warnings.caveats(scenario))
    terminal.warn(scenario.name, warnings)
    return warnings
