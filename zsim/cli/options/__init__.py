"""The commands of `zsim` by name, as the parser knows them: help, example and options.

No file here imports more than the parser needs, so that help and completion are quick.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """A command: its file in the folder commands, its line in `zsim --help`, and the example below
    its own help. The function of its options has the file's name."""

    file: str
    help: str
    example: str

    def add_options(self, command: argparse.ArgumentParser) -> None:
        """Add the command's options to its parser."""
        room, _, name = self.file.partition(".")
        getattr(import_module(f"{__name__}.{room}"), name)(command)


COMMANDS = {
    "run": Command(
        "runs.run", "run scenarios on a backend and check what they expect",
        "zsim run mine.toml --trace step.json.gz",
    ),
    "validate": Command(
        "runs.validate", "simulate, run for real, compare: the main job",
        "zsim validate scenarios/parity/zero3-mlp-4.toml --require memory",
    ),
    "compare": Command(
        "runs.compare", "compare two saved Runs", "zsim compare predicted.json measured.json"
    ),
    "show": Command(
        "analysis.show", "the mesh, its routes, the Program and the memory of a scenario",
        "zsim show mine.toml --memory --time",
    ),
    "fit": Command(
        "analysis.fit", "compare every strategy, with and without activation checkpointing",
        "zsim fit mine.toml",
    ),
    "plan": Command(
        "analysis.plan", "the way to train a model: strategy, micro-batch and number of GPUs",
        "zsim plan mine.toml --nodes 1,2,4 --tokens 1e12 --days 30 -o best.toml",
    ),
    "sweep": Command(
        "analysis.sweep", "a scenario at every combination of values, as a table",
        "zsim sweep axes.toml -o table.csv",
    ),
    "report": Command(
        "analysis.report", "one HTML page to look at: timeline, memory, traffic, trade-off",
        "zsim report mine.toml -o page.html",
    ),
    "accuracy": Command(
        "calibration.accuracy", "predict published measurements, and print the errors",
        "zsim accuracy tests/published",
    ),
    "calibrate": Command(
        "calibration.calibrate", "fit constants to measurements, and write a cluster file",
        "zsim calibrate --here --quick --out here.toml",
    ),
    "import": Command(
        "files.import_config",
        "make a scenario of another tool's config, or a Run of a trace of your own training",
        "zsim import ds_config.json --model llama-3-8b --cluster dgx-h100 -o mine.toml",
    ),
    "export": Command(
        "files.export", "write a scenario as another tool's config",
        "zsim export fully_shard mine.toml -o parallelize.py",
    ),
    "trace": Command(
        "files.trace", "make a model of a module of yours, or of any config.json of transformers",
        "zsim trace hf:config.json --input 2x2048 --dtype bf16 -o model.json",
    ),
    "new": Command(
        "setup.new", "a scenario to begin with: asks what no option says",
        "zsim new --model llama-3-8b --cluster dgx-h100 --nodes 2 -o mine.toml",
    ),
    "diff": Command(
        "analysis.diff", "two scenarios simulated, figure by figure, for a pull request",
        "zsim diff base.toml head.toml --markdown comment.md --junit diff.xml",
    ),
    "doctor": Command(
        "setup.doctor", "installed parts, backends that run here, and how to get the rest",
        "zsim doctor",
    ),
    "completion": Command(
        "setup.completion", "a script that completes zsim's commands in a shell",
        "zsim completion zsh",
    ),
    "lint": Command(
        "analysis.lint", "costly mistakes of a scenario, with their cost", "zsim lint mine.toml"
    ),
    "checkpoint": Command(
        "analysis.checkpoint",
        "files of a scenario's checkpoint, time and memory to save and load it",
        "zsim checkpoint mine.toml --to-ranks 16",
    ),
    "explain": Command(
        "analysis.explain", "cause of a hang, from its ranks' NCCL flight recorders",
        "zsim explain dumps/",
    ),
    "list": Command(
        "setup.listing", "list scenarios, models, clusters, strategies, backends",
        "zsim list clusters",
    ),
}
