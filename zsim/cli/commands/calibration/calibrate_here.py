"""`zsim calibrate --here`: this machine measured, its constants printed and kept for `zsim
validate`, which measures it in the quick form where there is no measurement.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import cast

from zsim.calibration.machine import device_file, here, machine_file
from zsim.calibration.machine.fit import FittedMachine, constants
from zsim.cli.inputs import UsageError
from zsim.cli.terminal import note, progress, say, table, warn, write_json, wrote
from zsim.errors import ZsimError
from zsim.io import files
from zsim.io.units import format_bytes, format_time
from zsim.runs import registry
from zsim.runs.backend import Backend, DeviceBackend, Gpus

WORLD_SIZE = 2
"""Ranks at work by default."""
OFF = "ZSIM_NO_CALIBRATE"
"""The environment variable with which no machine is measured unasked, as with --no-calibrate."""
MOST_RANKS_A_CORE = 4
"""Ranks on a core beyond which a measurement takes minutes, and says little."""


def at_first_use(backend: Backend, world_size: int) -> Path | None:
    """Measure this machine in the quick form; returns the file, which is kept unless other work
    ran beside. None, with the reason on standard error, where it cannot be measured."""
    path = machine_file.cached(world_size)
    if reason := _obstacle(world_size):
        note(f"this machine is not measured, so times are not judged: {reason}")
        return None
    note(
        f"measuring this machine with {world_size} ranks, once, in about 20 s; "
        f"--no-calibrate leaves times unjudged"
    )
    try:
        with progress(f"measuring this machine with {world_size} ranks"):
            made = here.calibrated(backend, world_size=world_size, quick=True)
        if made.fitted.busy:
            note(f"{_widened(made.fitted)}; it is measured again next time")
            path = machine_file.beside_others(path)
        files.write(path, made.text)
    except ZsimError as error:
        note(f"this machine could not be measured, so times are not judged: {error}")
        return None
    wrote(path)
    return path


def _obstacle(world_size: int) -> str:
    """The reason for which a measurement now would say little; "" for none."""
    cores = os.cpu_count() or 1
    if world_size > MOST_RANKS_A_CORE * cores:
        return f"{world_size} ranks on {cores} cores take turns"
    return ""


def _widened(fitted: FittedMachine) -> str:
    """Words on a measurement beside other work, and on the band that it makes."""
    return f"{fitted.busy} while it was measured; the band is widened to ±{fitted.width:.0%}"


def calibrate(options: argparse.Namespace) -> int:
    """Measure, print the constants and their errors, and write the file: to --out, else to the
    user's cache, where `zsim validate` finds it."""
    backend = registry.find(options.backend or "gloo")
    gpus = registry.capabilities(backend).gpus
    if gpus is not None:
        return _gpus_calibrated(cast(DeviceBackend, backend), gpus, options)
    if options.cluster:
        raise UsageError(
            where="--cluster", expected="--backend nccl, whose node it names", found=backend.name
        )
    world_size = options.world_size or WORLD_SIZE
    path = Path(options.out) if options.out else machine_file.cached(world_size)
    files.require(path, option="--out" if options.out else "", kind="a cluster's file")
    with progress(f"measuring this machine with {world_size} ranks"):
        made = here.calibrated(backend, world_size=world_size, quick=options.quick)
    files.write(path, made.text)
    fitted = made.fitted
    values = constants(fitted)
    if fitted.busy:
        warn("calibrate", [f"{_widened(fitted)}; measure again on a quiet machine"])
    if options.json:
        write_json({
            "machine": machine_file.processor(), "world_size": world_size, "file": str(path),
            "seconds": round(made.seconds, 1), "constants": values,
            "half_width": fitted.width, "left_out_errors": list(fitted.errors),
            "spread": fitted.spread, "others_share": fitted.others_share,
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
        ("other work's share of the cores", f"{fitted.others_share:.1%}"),
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


def _require_same_node(path: Path, node: str) -> None:
    """UsageError where the machine's file was measured as another node than `node`."""
    other = device_file.node_of(path)
    if other not in ("", node):
        raise UsageError(
            where="--cluster", expected=f"{other}, as the node that {path} has", found=node,
            remedy="--out FILE.toml for another file, or delete that one",
        )


def _gpus_calibrated(backend: DeviceBackend, gpus: Gpus, options: argparse.Namespace) -> int:
    world_size = options.world_size or gpus.count
    path = Path(options.out) if options.out else machine_file.cached(world_size, gpus)
    files.require(path, option="--out" if options.out else "", kind="a cluster's file")
    if not options.out:
        _require_same_node(path, device_file.base_of(gpus, options.cluster).cluster)
    with progress(f"measuring {world_size} of this machine's GPUs"):
        made = here.gpus_calibrated(
            backend, gpus, world_size=world_size, quick=options.quick, preset=options.cluster
        )
    files.write(path, made.text)
    fitted = made.fitted
    warn("calibrate", list(fitted.doubts))
    if options.json:
        write_json({
            "gpu": gpus.name, "world_size": world_size, "file": str(path),
            "seconds": round(made.seconds, 1), "doubts": list(fitted.doubts),
            "without_curves": fitted.without_curves,
            "constants": {
                constant.key: {
                    "factor": constant.factor, "half_width": constant.width,
                    "spread": constant.spread, "left_out_errors": list(constant.errors),
                }
                for constant in fitted.constants
            },
            "curves": [
                {"scope": curve.scope, "collective": curve.collective, "band": curve.band}
                for curve in (fitted.curves.curves if fitted.curves else ())
            ],
        })
        return 0
    rows = [
        (constant.key, f"{constant.factor:.3f} × the preset's, ± {constant.width:.1%}")
        for constant in fitted.constants
    ]
    rows += [
        (f"curves.{curve.scope}.{curve.collective}", f"± {curve.band:.1%} of large messages")
        for curve in (fitted.curves.curves if fitted.curves else ())
    ]
    table(f"{world_size} × {gpus.name}", rows)
    if fitted.without_curves:
        say(fitted.without_curves)
    say(f"measured in {made.seconds:.0f} s")
    wrote(path, "" if options.out else "; `zsim validate --against nccl` uses it")
    return 0
