"""`zsim import`: a scenario from another tool's config, or a Run from traces."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zsim.cli import outputs, terminal
from zsim.cli.inputs import UsageError
from zsim.cli.options.answers import KEYS, settings
from zsim.configs.draft import Answers
from zsim.configs.importers import IMPORTERS
from zsim.configs.reading import read_config
from zsim.errors import listed, visible
from zsim.io import files

TRACES = "kineto"


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
            where="zsim import", expected=f"one config, of {listed(IMPORTERS)}",
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
