"""`zsim sweep`: a scenario at every combination of the values in a file, as a table."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from zsim.analysis import sweep
from zsim.analysis.sweep import plot
from zsim.cli import outputs, terminal
from zsim.io.units import counted
from zsim.ir.run import SCHEMA_VERSION


def run(options: argparse.Namespace) -> int:
    """`zsim sweep`: 0 where points were computed or refused by name, 1 where one failed or all were
    refused."""
    scenario, axes = sweep.read(options.file)
    out, name = Path(options.out) if options.out else None, Path(options.file).name
    if out:
        outputs.require(out, option="-o", apart_from=[Path(options.file)])
    picture = Path(options.plot) if options.plot else None
    if picture:
        plot.require(picture)
        outputs.require(picture, option="--plot", apart_from=[Path(options.file)])
    result = sweep.sweep(
        scenario, axes, on=options.on, workers=options.workers, out=out,
        say=terminal.telling(f"{name}: "),
    )
    if result.num_resumed:
        terminal.note(f"{counted(result.num_resumed, 'row')} taken from {out}.journal")
    if options.json:
        terminal.write_json({"schema_version": SCHEMA_VERSION, **result.to_dict()})
    else:
        for line in str(result).splitlines():
            terminal.say_wrapped(line, hanging=7)
    if out:
        terminal.wrote(out, "; its .journal keeps what is done")
    if picture:
        plot.write(result, picture)
        terminal.wrote(picture)
    statuses = Counter(row["status"] for row in result.rows)
    return 1 if statuses["failed"] or statuses["died"] or not statuses["ok"] else 0
