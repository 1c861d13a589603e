"""`zsim diff`: two scenarios simulated, figure by figure, for a pull request."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zsim import api
from zsim.analysis.difference import FigureChange, ScenarioDiff, diff, titled
from zsim.analysis.growth import parse_limits
from zsim.cli import outputs, terminal
from zsim.cli.inputs import load_one
from zsim.cli.reports import junit
from zsim.io import files
from zsim.ir.run import SCHEMA_VERSION


def run(options: argparse.Namespace) -> int:
    """`zsim diff`: 0, or 1 where the second scenario no longer fits, grows by more than --fail-if
    allows, or breaks its own expectations."""
    limits = parse_limits(options.fail_if, where="--fail-if") if options.fail_if else ()
    outs = [Path(name) for name in (options.markdown, options.junit) if name]
    taken = [Path(options.base), Path(options.head)]
    for name, option in ((options.markdown, "--markdown"), (options.junit, "--junit")):
        if name:
            outputs.require(Path(name), option=option, apart_from=taken)
    base, head = load_one(options.base), load_one(options.head)
    with terminal.progress(f"{base.name} and {head.name}: simulated"):
        result = diff(api.simulate(base), api.simulate(head), limits=limits)
    if options.json:
        terminal.write_json({"schema_version": SCHEMA_VERSION, **result.to_dict()})
    else:
        _say(result)
    if options.markdown:
        files.write(Path(options.markdown), result.to_markdown())
    if options.junit:
        _write_junit(result, Path(options.junit))
    for out in outs:
        terminal.wrote(out)
    return 0 if result.ok else 1


def _say(result: ScenarioDiff) -> None:
    terminal.say_wrapped(f"{titled(result.base)} → {titled(result.head)}", hanging=2, most=80)
    say_figures(result.figures)
    for reason in result.broken:
        terminal.say_wrapped(f"  BROKEN {reason}", hanging=9)


def say_figures(figures: Sequence[FigureChange]) -> None:
    """A line for each figure that is the same, and two for each that is not, of 80 columns."""
    width = max(len(each.name) for each in figures)
    for each in figures:
        same = ", the same" if each.change == "same" else ""
        terminal.say(f"  {each.name:{width}}  {each.text('base')}{same}")
        if not same:
            terminal.say_wrapped(f"  {'':{width}}  → {each.text('head')}: {each.told}",
                                 hanging=width + 6, most=80)


def _write_junit(result: ScenarioDiff, path: Path) -> None:
    """A test case for each figure, and for each expectation of the second scenario."""
    name = result.head.record.scenario
    junit.write_cases(
        path, [(f"{name}: {case}", reason) for case, reason in result.cases.items()]
    )
