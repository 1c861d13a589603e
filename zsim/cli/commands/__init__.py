"""The commands of `zsim` by name, each in a file of its own, imported when it is asked for."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import NamedTuple, Protocol, cast


class Command(NamedTuple):
    """A command's file in this folder, and its line in `zsim --help`."""

    file: str
    help: str


class CommandFile(Protocol):
    """The content of a command's file."""

    EXAMPLE: str
    """An example, below the command's help."""

    def add_options(self, command: argparse.ArgumentParser) -> None:
        """Add the command's options to its parser."""

    def run(self, options: argparse.Namespace) -> int:
        """Do what the options say; returns the exit code."""


COMMANDS = {
    "run": Command("runs.run", "run scenarios on a backend and check what they expect"),
    "validate": Command("runs.validate", "simulate, run for real, compare: the main job"),
    "compare": Command("runs.compare", "compare two saved Runs"),
    "show": Command(
        "analysis.show", "the mesh, its routes, the Program and the memory of a scenario"
    ),
    "fit": Command(
        "analysis.fit", "compare every strategy, with and without activation checkpointing"
    ),
    "plan": Command(
        "analysis.plan", "the way to train a model: strategy, micro-batch and number of GPUs"
    ),
    "sweep": Command("analysis.sweep", "a scenario at every combination of values, as a table"),
    "report": Command(
        "analysis.report", "one HTML page to look at: timeline, memory, traffic, trade-off"
    ),
    "accuracy": Command(
        "calibration.accuracy", "predict published measurements, and print the errors"
    ),
    "calibrate": Command(
        "calibration.calibrate", "fit constants to measurements, and write a cluster file"
    ),
    "import": Command(
        "files.import_config",
        "make a scenario of another tool's config, or a Run of a trace of your own training",
    ),
    "export": Command("files.export", "write a scenario as another tool's config"),
    "trace": Command(
        "files.trace", "make a model of a module of yours, or of any config.json of transformers"
    ),
    "new": Command("setup.new", "a scenario to begin with: asks what no option says"),
    "diff": Command(
        "analysis.diff", "two scenarios simulated, figure by figure, for a pull request"
    ),
    "doctor": Command(
        "setup.doctor", "installed parts, backends that run here, and how to get the rest"
    ),
    "completion": Command("setup.completion", "a script that completes zsim's commands in a shell"),
    "lint": Command(
        "analysis.lint", "costly mistakes of a scenario, with their cost"
    ),
    "checkpoint": Command(
        "analysis.checkpoint",
        "files of a scenario's checkpoint, time and memory to save and load it",
    ),
    "explain": Command(
        "analysis.explain", "cause of a hang, from its ranks' NCCL flight recorders"
    ),
    "list": Command("setup.listing", "list scenarios, models, clusters, strategies, backends"),
}


def command_file(name: str) -> CommandFile:
    """The file of a command, imported."""
    return cast(CommandFile, import_module(f"{__name__}.{COMMANDS[name].file}"))
