"""`zsim new`: five questions, and a scenario that runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zsim.cli import arguments, shared_options, terminal
from zsim.cli.commands.files.answers import add_answers, settings
from zsim.cli.inputs import UsageError
from zsim.configs.draft import Answers, Draft
from zsim.configs.notes import Notes
from zsim.errors import ScenarioError
from zsim.io import files
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

EXAMPLE = "zsim new --model llama-3-8b --cluster dgx-h100 --nodes 2 -o mine.toml"
QUESTIONS = {
    "model": ("Model? A preset of `zsim list models`, or a config.json", "llama-3-8b"),
    "cluster": ("Cluster? A preset of `zsim list clusters`, or a file", "dgx-h100"),
    "size": ("Nodes, or ranks of a CPU host?", "1"),
    "sequence_length": ("Tokens of a sequence?", "4096"),
    "strategy": (f"Strategy? One of {', '.join(STRATEGIES)}", "fsdp2"),
}
"""Each question, and the answer that Enter gives."""
KEYS = {
    "model": ("model",), "cluster": ("cluster.preset", "cluster.file", "--cluster"),
    "size": ("cluster.nodes", "cluster.ranks"), "sequence_length": ("batch.sequence_length",),
    "strategy": ("strategy.name",),
}
"""Keys of problems with the answer to each question."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim new`."""
    command.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default="scenario.toml",
        help="the file to write (default scenario.toml)",
    )
    add_answers(command)
    command.add_argument(
        "--strategy", metavar="NAME", default=None, help="a strategy of `zsim list strategies`"
    )
    shared_options.json_option(command)


def run(options: argparse.Namespace) -> int:
    """`zsim new`: asks for what no option says, and writes the scenario."""
    out = Path(options.out)
    if out.exists():
        raise UsageError(
            where="-o", expected="a new file", found=f"{out}, which is there already",
            remedy="name another",
        )
    files.require(out, option="-o")
    answers = _answers(options, folder=out.parent)
    scenario = _scenario(answers, options, folder=out.parent)
    files.write(out, scenario.to_toml())
    if options.json:
        terminal.write_json({"file": str(out), "scenario": scenario.tables})
    else:
        terminal.say(repr(scenario))
    terminal.wrote(out, f"; zsim run {out} simulates it, zsim plan {out} looks for a better one")
    return 0


def _answers(options: argparse.Namespace, *, folder: Path) -> dict[str, str]:
    """The answer to each question, from an option or from the terminal."""
    given = {
        "model": options.model, "cluster": options.cluster,
        "size": options.ranks if options.nodes is None else options.nodes,
        "sequence_length": options.sequence_length, "strategy": options.strategy,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing and not sys.stdin.isatty():
        names = {"size": "--nodes"}
        flags = ", ".join(names.get(name, f"--{name.replace('_', '-')}") for name in missing)
        raise UsageError(
            where="zsim new", expected=f"a terminal to ask on, or {flags}", found="neither"
        )
    answers = {name: default for name, (_, default) in QUESTIONS.items()}
    answers |= {name: str(value) for name, value in given.items() if value is not None}
    for name in missing:
        while True:
            line = _asked(*QUESTIONS[name])
            answers[name] = line.strip() or QUESTIONS[name][1]
            problems = _problems(name, answers, options, folder=folder) if line else []
            if not problems:
                break
            for problem in problems:
                terminal.note(problem)
    return answers


def _asked(question: str, default: str) -> str:
    """The line that was typed; "" at the end of input."""
    sys.stderr.write(f"{question} [{default}] ")
    sys.stderr.flush()
    return sys.stdin.readline()


def _problems(
    name: str, answers: dict[str, str], options: argparse.Namespace, *, folder: Path
) -> list[str]:
    """Problems of the answer to a question, beside answers before and defaults after it."""
    try:
        _scenario(answers, options, folder=folder)
    except ScenarioError as error:
        told = [problem.removeprefix("zsim new: ") for problem in error.problems]
        return [problem for problem in told if problem.startswith(KEYS[name])]
    return []


def _scenario(
    answers: dict[str, str], options: argparse.Namespace, *, folder: Path
) -> Scenario:
    """The scenario of the answers; ScenarioError with every answer that does not do."""
    told: dict[str, Any] = {
        "batch.sequence_length": _whole(answers["sequence_length"]),
        "batch.micro_batch": 1, "strategy.name": answers["strategy"],
    } | settings(options)
    told.pop("cluster.ranks", None)
    told.pop("cluster.nodes", None)
    notes = Notes(where="zsim new")
    draft = Draft(notes, Answers(
        model=answers["model"], cluster=answers["cluster"], settings=told, folder=folder,
    ))
    cluster = draft.cluster
    on_gpus = cluster is not None and cluster.kind != "cpu"
    draft.put(f"cluster.{'nodes' if on_gpus else 'ranks'}", _whole(answers["size"]))
    if on_gpus:
        draft.put("precision", {"parameters": "bf16", "reduce": "fp32"})
    axes = {"strategy.dp_replicate", "strategy.dp_shard"}
    if answers["strategy"] == "hsdp" and axes.isdisjoint(told):
        nodes = _whole(answers["size"]) if on_gpus else 1
        draft.put("strategy.dp_replicate", nodes if isinstance(nodes, int) and nodes > 1 else 2)
    draft.put("optimizer", {"name": "adamw", "implementation": "fused" if on_gpus else "foreach"})
    draft.put("batch.accumulation", told.get("batch.accumulation", 1))
    try:
        return draft.finish(name="new")
    except ScenarioError as error:
        lines = (line.replace("zsim new: as a scenario: ", "zsim new: ") for line in error.problems)
        raise ScenarioError(tuple(lines)) from None


def _whole(text: str) -> int | str:
    """The number in `text`, or the text, which the scenario refuses."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text
