"""`zsim import`: a scenario from another tool's config, or a Run from traces."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zsim.cli import arguments, outputs, shared_options, terminal
from zsim.cli.commands.files.answers import KEYS, add_answers, settings
from zsim.cli.inputs import UsageError
from zsim.configs.draft import Answers
from zsim.configs.reading import IMPORTERS, read_config
from zsim.errors import visible
from zsim.io import files

EXAMPLE = "zsim import ds_config.json --model llama-3-8b --cluster dgx-h100 -o mine.toml"
TRACES = "kineto"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim import`."""
    command.add_argument(
        "files", nargs="+", type=arguments.path, metavar="[KIND] FILE",
        help=f"a config ({' or '.join(IMPORTERS)}; without KIND, its content tells); or kineto and "
             "one trace of torch's profiler for each rank",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default=None,
        help="write the scenario (default: print it)",
    )
    add_answers(command)
    command.add_argument(
        "--drop", type=arguments.names, default=(), metavar="KEY,…",
        help="keys of the config to leave out",
    )
    command.add_argument(
        "--recipe", metavar="NAME", default="",
        help="function that makes a torchtitan Python config",
    )
    command.add_argument(
        "--scenario", metavar="SCENARIO", type=arguments.path, default=None,
        help="scenario of a kineto trace, for mesh and units",
    )
    command.add_argument(
        "--save", metavar="RUN.json", type=arguments.path, default=None,
        help="write the Run of a kineto trace, for `zsim compare`",
    )
    shared_options.json_option(command)


def run(options: argparse.Namespace) -> int:
    """`zsim import [KIND] FILE…`: 0 where the scenario or the Run is made."""
    first = options.files[0]
    kind = first if first in (*IMPORTERS, TRACES) else None
    options.files = options.files[1:] if kind else options.files
    if not options.files:
        raise UsageError(where="zsim import", expected=f"a file of {kind}", found="none")
    if kind == TRACES:
        from zsim.cli.commands.files import kineto  # start-up: configs need none of it

        others = ("out", "model", "cluster", "drop", "recipe", "settings", *KEYS)
        _require_no(options, *others, reads=TRACES)
        return kineto.import_traces(options)
    _require_no(options, "scenario", "save", reads="a config")
    if len(options.files) > 1:
        raise UsageError(
            where="zsim import", expected=f"one config, of the kind {', '.join(IMPORTERS)}",
            found=" ".join(options.files)[:80],
        )
    return _config(Path(options.files[0]), options, kind=kind)


def _config(path: Path, options: argparse.Namespace, *, kind: str | None) -> int:
    out = Path(options.out) if options.out else None
    if out:
        outputs.require(out, option="-o", apart_from=[path])
    answers = Answers(
        model=options.model, cluster=options.cluster, settings=settings(options),
        folder=out.parent if out else Path("."), dropped=options.drop,
    )
    result = read_config(path, answers, kind=kind, recipe=options.recipe)
    text = result.scenario.to_toml()
    if options.json:
        terminal.write_json(result.to_dict())
    elif out:
        for line in str(result).splitlines():
            terminal.say_wrapped(line, hanging=2)
    else:
        sys.stderr.write("".join(f"{visible(line)}\n" for line in str(result).splitlines()))
        for line in text.splitlines():
            terminal.say(line)
    if out:
        files.write(out, text)
        terminal.wrote(out, "; zsim run simulates it")
    return 0


def _require_no(options: argparse.Namespace, *names: str, reads: str) -> None:
    for name in names:
        if getattr(options, name):
            option = {"settings": "--set", "out": "-o"}.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(where=option, expected=f"no such option with {reads}", found="it")
