"""`zsim calibrate --here`: this machine measured, its constants printed and kept for `zsim
validate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from zsim.calibration.machine import here, machine_file
from zsim.calibration.machine.fit import constants
from zsim.cli.report import progress, say, table, warn, write_json, wrote
from zsim.io import files
from zsim.io.units import format_bytes, format_time
from zsim.runs import registry

WORLD_SIZE = 2
"""Ranks at work where nobody asks for others."""


def calibrated(options: argparse.Namespace) -> int:
    """Measure, print the constants and their errors, and write the file: to --out, else to the
    user's cache, where `zsim validate` finds it."""
    backend = registry.find(options.backend or "gloo")
    registry.capabilities(backend)
    world_size = options.world_size or WORLD_SIZE
    path = Path(options.out) if options.out else machine_file.cached(world_size)
    files.require(path, option="--out" if options.out else "", kind="a cluster's file")
    with progress(f"measuring this machine with {world_size} ranks"):
        made = here.calibrated(backend, world_size=world_size, quick=options.quick)
    files.write(path, made.text)
    fitted = made.fitted
    values = constants(fitted)
    if fitted.busy:
        warn("calibrate", [
            f"equal steps differ by {fitted.spread:.0%}: other work ran beside them; the band is "
            f"as wide, measure again on a quiet machine"
        ])
    if options.json:
        write_json({
            "machine": machine_file.processor(), "world_size": world_size, "file": str(path),
            "seconds": round(made.seconds, 1), "constants": values,
            "half_width": fitted.width, "left_out_errors": list(fitted.errors),
            "spread": fitted.spread,
            "collectives": [
                {"collective": each.collective, "ranks": each.ranks, "width": each.width,
                 "times_ns": {str(nbytes): ns for nbytes, ns in each.points}}
                for each in fitted.times
            ],
        })
        return 0
    rows = [
        (name, value) for part in values.values() for name, value in part.items()
        if value != "0 ns"
    ]
    errors = [abs(error) for error in fitted.errors]
    rows += [
        ("steps left out of the fit", f"median error {median(errors):.1%}, largest "
                                      f"{max(errors):.1%}"),
        ("half-width of the band", f"{fitted.width:.1%}"),
        ("spread of equal steps", f"{fitted.spread:.1%}"),
    ]
    rows += [
        (
            f"{each.collective} of {each.ranks} ranks",
            ", ".join(f"{format_bytes(n)} {format_time(ns)}" for n, ns in each.points[::2]),
        )
        for each in fitted.times
    ]
    table(f"{machine_file.processor()}, {world_size} ranks at work", rows)
    say(f"measured in {made.seconds:.0f} s")
    wrote(path, "" if options.out else "; `zsim validate` uses it")
    return 0
