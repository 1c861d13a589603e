"""`zsim new`: five questions, and a scenario that runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.cli import outputs, terminal
from zsim.cli.inputs import UsageError
from zsim.cli.options.answers import settings
from zsim.configs.draft import Answers, Draft, model_table
from zsim.configs.notes import Notes
from zsim.errors import ScenarioError, ZsimError, key_of, listed
from zsim.io import files
from zsim.models.training_options import DTYPE_NAMES
from zsim.scenario.scenario import Scenario
from zsim.strategies import ALONE, STRATEGIES

if TYPE_CHECKING:
    from zsim.autograd.traced.model import TracedModel

QUESTIONS = {
    "model": ("Model? A preset of `zsim list models`, a config.json, or a traced model",
              "llama-3-8b"),
    "cluster": ("Cluster? A preset of `zsim list clusters`, or a file", "dgx-h100"),
    "size": ("Nodes, ranks of a CPU host, or as 1 GPU?", "1"),
    "sequence_length": ("Tokens of a sequence?", "4096"),
    "strategy": (f"Strategy? It is {listed(STRATEGIES)}", "fsdp2"),
}
"""Each question, and the answer that Enter gives; on one rank that is another strategy."""
KEYS = {
    "model": ("model",), "cluster": ("cluster.preset", "cluster.file", "--cluster"),
    "size": ("cluster.nodes", "cluster.ranks"),
    "sequence_length": ("batch.sequence_length", "model.traced"), "strategy": ("strategy.name",),
}
"""Keys of problems with the answer to each question."""


def run(options: argparse.Namespace) -> int:
    """`zsim new`: asks for what no option says, and writes the scenario."""
    out = Path(options.out)
    if out.exists():
        raise UsageError(
            where="-o", expected="a new file", found=f"{out}, which is there already",
            remedy="name another",
        )
    outputs.require(out, option="-o")
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
    values = {
        "model": options.model, "cluster": options.cluster,
        "size": options.ranks if options.nodes is None else options.nodes,
        "sequence_length": options.sequence_length, "strategy": options.strategy,
    }
    if options.model and not options.sequence_length:
        values["sequence_length"] = _only_length(options.model)
    missing = [name for name, value in values.items() if value is None]
    if missing and not sys.stdin.isatty():
        names = {"size": "--nodes"}
        flags = ", ".join(names.get(name, f"--{name.replace('_', '-')}") for name in missing)
        raise UsageError(
            where="zsim new", expected=f"a terminal to ask on, or {flags}", found="none of them"
        )
    answers = {name: default for name, (_, default) in QUESTIONS.items()}
    answers |= {name: str(value) for name, value in values.items() if value is not None}
    for name in missing:
        question, default = _question(name, answers["model"])
        if name == "strategy" and _draft(answers, options, folder=folder).world == 1:
            default = answers[name] = ALONE
        while name != "sequence_length" or _only_length(answers["model"]) is None:
            line = _asked(question, default)
            answers[name] = line.strip() or default
            if name == "model" and "sequence_length" in missing:
                answers["sequence_length"] = _question("sequence_length", answers[name])[1]
            problems = _problems(name, answers, options, folder=folder) if line else []
            if not problems:
                break
            for problem in problems:
                terminal.note(problem)
    return answers


def _question(name: str, model: str) -> tuple[str, str]:
    """A question, and the answer that Enter gives."""
    question, default = QUESTIONS[name]
    if name == "sequence_length" and (traced := _lengths(model)):
        return f"{question} Traced are {', '.join(map(str, traced))}.", str(traced[0])
    return question, default


def _traced(model: str) -> tuple[TracedModel, ...]:
    """The traced model in the file `model`, once for each batch; none of another model."""
    if "traced" not in model_table(model, Path()):
        return ()
    from zsim.autograd.traced import traced_file  # start-up: the schema of files takes 20 ms

    try:
        return traced_file.load_all(model)
    except ZsimError:
        return ()  # the scenario tells it


def _lengths(model: str) -> list[int]:
    return sorted({traced.batch.sequence_length for traced in _traced(model)})


def _only_length(model: str) -> int | None:
    """The one sequence length at which a model was traced; None where there is a choice."""
    lengths = _lengths(model)
    return lengths[0] if len(lengths) == 1 else None


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
        problems = error.under("zsim new")
        return [problem for problem in problems if key_of(problem).startswith(KEYS[name])]
    return []


def _scenario(
    answers: dict[str, str], options: argparse.Namespace, *, folder: Path
) -> Scenario:
    """The scenario of the answers; ScenarioError with every answer that does not do."""
    table: dict[str, Any] = {
        "batch.sequence_length": _whole(answers["sequence_length"]),
        "batch.micro_batch": min(
            (traced.batch.micro_batch for traced in _traced(answers["model"])), default=1
        ),
        "strategy.name": answers["strategy"],
    } | settings(options)
    for key in KEYS["size"]:
        table.pop(key, None)
    draft, strategy = _draft(answers, options, folder=folder, table=table), answers["strategy"]
    on_gpus, known = _on_gpus(draft), STRATEGIES.get(strategy)
    if on_gpus:
        draft.put("precision", _precision(answers["model"], alone=strategy == ALONE))
    axes = {"strategy.dp_replicate", "strategy.dp_shard"}
    if known is not None and known.asks_replicas and axes.isdisjoint(table):
        nodes = draft.get("cluster.nodes")
        draft.put("strategy.dp_replicate", nodes if isinstance(nodes, int) and nodes > 1 else 2)
    draft.put("optimizer", {"name": "adamw", "implementation": "fused" if on_gpus else "foreach"})
    draft.put("batch.accumulation", table.get("batch.accumulation", 1))
    return draft.finish(name="new", as_scenario="")


def _draft(
    answers: dict[str, str], options: argparse.Namespace, *, folder: Path,
    table: dict[str, Any] | None = None,
) -> Draft:
    """The model, the cluster and its size, with other keys of `table`. GPUs are counted in nodes,
    but for some of one node: "1 GPU", or --ranks."""
    draft = Draft(Notes(where="zsim new"), Answers(
        model=answers["model"], cluster=answers["cluster"], settings=table or {}, folder=folder,
    ))
    number, _, unit = answers["size"].partition(" ")
    some = unit in ("GPU", "GPUs")
    in_ranks = some or not _on_gpus(draft) or (options.nodes is None and options.ranks is not None)
    size = _whole(number if some else answers["size"])
    draft.put("cluster.ranks" if in_ranks else "cluster.nodes", size)
    return draft


def _on_gpus(draft: Draft) -> bool:
    return draft.cluster is not None and draft.cluster.kind != "cpu"


def _precision(model: str, *, alone: bool) -> dict[str, Any]:
    """Dtypes on GPUs: bf16 with gradients reduced in fp32, that of autocast around a module
    `alone`, or those of a trace."""
    for traced in _traced(model)[:1]:
        if traced.autocast != "none":
            return {"autocast": DTYPE_NAMES[traced.autocast]}
        return {"parameters": DTYPE_NAMES[traced.dtype], "reduce": "fp32"}
    return {"autocast": "bf16"} if alone else {"parameters": "bf16", "reduce": "fp32"}


def _whole(text: str) -> int | str:
    """The number in `text`, or the text, which the scenario refuses."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text
