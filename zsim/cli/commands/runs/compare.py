"""`zsim compare`: two saved Runs, check by check."""

from __future__ import annotations

import argparse

from zsim import api
from zsim.cli import terminal
from zsim.cli.inputs import UsageError
from zsim.cli.reports import run_report
from zsim.ir.run import SCHEMA_VERSION
from zsim.runs.comparison import Comparison


def run(options: argparse.Namespace) -> int:
    """`zsim compare`: 0 when every check that can be made is fine. Simulations of two scenarios are
    no such checks: their figures are set side by side."""
    for name in (options.predicted, options.measured):
        if name.endswith(".toml"):
            raise UsageError(
                where=name, expected="a saved Run", found="a scenario",
                remedy="`zsim diff` compares two scenarios, `zsim run --save` writes a Run",
            )
    comparison = api.compare(options.predicted, options.measured, require=options.require)
    if comparison.of_two_scenarios and not options.require:
        return _side_by_side(comparison, options)
    if options.json:
        run_report.write_checks([comparison], [], several=False)
    else:
        run_report.print_checks(comparison, exact=options.verbose)
    return 0 if comparison.ok else 1


def _side_by_side(comparison: Comparison, options: argparse.Namespace) -> int:
    from zsim.analysis.difference import record_changes  # start-up: few Runs are such
    from zsim.cli.commands.analysis.diff import say_figures

    figures = tuple(record_changes(comparison.predicted, comparison.measured))
    if options.json:
        terminal.write_json({
            "schema_version": SCHEMA_VERSION, "base": comparison.predicted.scenario,
            "head": comparison.measured.scenario, "figures": [each.to_dict() for each in figures],
            "ok": True,
        })
    else:
        head, *_ = str(comparison).splitlines()
        terminal.say_wrapped(head, hanging=2)
        terminal.say_wrapped(f"  not the same {comparison.checks[0].detail}", hanging=4)
        say_figures(figures)
    return 0
