"""`zsim report`: one HTML page about scenarios and saved Runs, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from zsim import api
from zsim import report as reporting
from zsim.cli import outputs, terminal
from zsim.cli.inputs import UsageError, load_all
from zsim.io import files
from zsim.report import ReportSide

MOST_SIDES = 8


def run(options: argparse.Namespace) -> int:
    """`zsim report`: 0 when the page is written. What is refused is told before anything runs."""
    saved = [name for name in options.inputs if name.endswith(".json")]
    named = [name for name in options.inputs if not name.endswith(".json")]
    out = Path(options.out)
    scenarios = load_all(named) if named else ()
    if len(scenarios) + len(saved) > MOST_SIDES:
        raise UsageError(
            where="zsim report", expected=f"at most {MOST_SIDES} scenarios and Runs",
            found=str(len(scenarios) + len(saved)), remedy="make several reports",
        )
    reporting.drawing_library()
    taken = [Path(name) for name in saved]
    taken += [Path(file) for scenario in scenarios for file in scenario.files]
    outputs.require(out, option="-o", apart_from=[*taken, *map(Path, named)], kind="a page")
    sides: list[ReportSide] = []
    for scenario in scenarios:
        with terminal.progress(f"{scenario.name}: simulated"):
            sides.append(reporting.of_scenario(scenario))
    sides += [reporting.of_record(api.load_run(name)) for name in saved]
    with terminal.progress("the page's tables"):
        text = reporting.report(sides, say=terminal.tell)
    files.write(out, text)
    terminal.wrote(out, f", {len(text.encode()) / 2**20:.2f} MiB; open it in a browser")
    if options.json:
        terminal.write_json({"file": str(out), "sides": [side.name for side in sides],
                           "bytes": len(text.encode())})
    return 0
