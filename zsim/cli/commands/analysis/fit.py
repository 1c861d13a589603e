"""The command fit: every strategy on a scenario's cluster, and the one to take."""

from __future__ import annotations

import argparse

from zsim.analysis.fit.fit import fit
from zsim.cli import terminal
from zsim.cli.inputs import load_with_options, warned
from zsim.cli.reports import memory_report


def run(options: argparse.Namespace) -> int:
    """`zsim fit`: 0 when something fits."""
    scenario = load_with_options(options)
    with terminal.progress(f"{scenario.name}: every stage on {scenario.cluster.name}"):
        fitted = fit(scenario, say=lambda text: terminal.tell(f"{scenario.name}: {text}"))
    memory_report.print_fit(fitted, as_json=options.json)
    if fitted.recommended is not None:
        warned(fitted.recommended.scenario)
    return 0 if fitted.recommended is not None else 1
