"""`zsim calibrate`: from measured steps, collectives and saved Runs to a cluster's constants, how
good they are, and a cluster's file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from zsim.calibration import accuracy
from zsim.calibration.data import inputs
from zsim.calibration.data.inputs import Material
from zsim.calibration.fitting import (
    fit_collectives,
    fit_steps,
    fit_warnings,
    planned_steps,
    write_cluster,
)
from zsim.calibration.fitting.fit_collectives import FittedCurves
from zsim.calibration.fitting.fit_steps import Fitted
from zsim.calibration.fitting.write_cluster import GroupErrors
from zsim.calibration.records import CalibrationError, Skipped
from zsim.cli import outputs
from zsim.cli.commands.calibration import calibrate_here
from zsim.cli.commands.calibration.accuracy import by_reason
from zsim.cli.inputs import UsageError
from zsim.cli.terminal import progress, say, tell, warn, write_json, wrote
from zsim.cluster.cluster_presets import load_cluster
from zsim.io import files

USUAL = "dgx-h100"
"""The cluster of files that do not say on which one they were measured."""


def run(options: argparse.Namespace) -> int:
    """`zsim calibrate --from FILE…`: constants fitted to measurements, their errors, and with --out
    a cluster's file. `zsim calibrate --here`: those of this machine, measured now."""
    _require_one_way(options)
    if options.here:
        return calibrate_here.calibrate(options)
    if options.out:
        outputs.require(
            Path(options.out), option="--out", apart_from=map(Path, options.files),
            kind="a cluster's file",
        )
    if options.cluster:
        load_cluster(options.cluster)  # an unknown one is said before files are read
    material = inputs.read(
        list(map(Path, options.files)),
        scenarios=Path(options.scenarios) if options.scenarios else None,
        cluster=options.cluster or USUAL,
    )
    preset = options.cluster or material.cluster or USUAL
    cluster, names = load_cluster(preset), ", ".join(material.names)
    node = cluster.nccl
    curves: FittedCurves | None = None
    with progress("calibration"):
        if material.collectives and node:
            rows, others = fit_collectives.usable(material.collectives, node)
            material.skipped += others
            curves = fit_collectives.fit(rows, node, source=names) if rows else None
        fitted = _steps(material, cluster.device.name, alone=curves is None)
    for name in material.simulated:
        tell(f"{name} is simulated, not measured, and what is fitted to it counts as "
             f"assumed")
    warn("calibrate", _doubts(fitted, curves))
    if options.out:
        text = write_cluster.text(
            preset, fitted, source=names, curves=curves, simulated=bool(material.simulated)
        )
        files.write(Path(options.out), text)
        wrote(options.out, f'; scenarios beside it name it: cluster = {{ file = '
                           f'"{Path(options.out).name}", nodes = 2 }}')
    if options.json:
        write_json(_as_json(fitted, curves, material))
    for line in () if options.json else _table(fitted, curves, material.skipped):
        say(line)
    return 0


def _require_one_way(options: argparse.Namespace) -> None:
    """UsageError unless either files or this machine are to be calibrated on, and options go
    together."""
    only_here = {
        "--quick": options.quick, "--world-size": options.world_size, "--backend": options.backend
    }
    only_files = {"--scenarios": options.scenarios}
    odd = [name for name, value in (only_files if options.here else only_here).items() if value]
    if bool(options.files) == options.here or odd:
        value = odd[0] if odd else "both" if options.here else "neither"
        raise UsageError(
            where="calibrate", expected="either --from FILE… or --here, with its own options",
            found=value, remedy="`zsim calibrate --help` has the options of both",
        )


def _steps(material: Material, device: str, *, alone: bool) -> Fitted | None:
    """Constants fitted to the steps on `device`, None for no fit; other steps are skipped by name.

    Steps of a single group raise CalibrationError where they are `alone`, and are skipped where
    there are curves as well.
    """
    cases, skipped = planned_steps.prepared(material.steps, say=tell)
    material.skipped += skipped
    others = [case for case in cases if case.scenario.cluster.device.name != device]
    material.skipped += [
        Skipped(
            source=case.step.source, line=case.step.line,
            reason=f"a step on {case.scenario.cluster.device.name}, not on {device}",
        )
        for case in others
    ]
    cases = [case for case in cases if case not in others]
    if alone and not cases:
        reasons = "; ".join(by_reason(material.skipped))[:400] or "no rows"
        expected = "measurements of the machine that --cluster names"
        raise CalibrationError(
            where="calibration", expected=expected, found=reasons,
            remedy="`zsim list clusters` has the others",
        )
    try:
        return fit_steps.fit(cases, say=tell)
    except CalibrationError as error:
        if alone:
            raise
        material.skipped += [
            Skipped(source=case.step.source, line=case.step.line, reason=str(error))
            for case in cases
        ]
        return None


def _doubts(fitted: Fitted | None, curves: FittedCurves | None) -> list[str]:
    return [caveat.text for caveat in fit_warnings.caveats(fitted, curves)]


def _as_json(
    fitted: Fitted | None, curves: FittedCurves | None, material: Material
) -> dict[str, Any]:
    """The object that `--json` prints: times in microseconds, errors as shares of the measurement.
    """
    steps: dict[str, Any] = {"constants": [], "rows": []}
    if fitted:
        steps = {
            "constants": [
                {
                    "generation": kind, "name": name, "factor": factor,
                    "heard": write_cluster.kernels_heard(fitted, name),
                }
                for (kind, name), factor in fitted.factors.items()
            ],
            "width": write_cluster.width(fitted),
            "rows": [
                {
                    "source": case.step.source, "line": case.step.line, "group": list(case.group),
                    "error": error, "left_out": left_out,
                }
                for case, error, left_out in zip(
                    fitted.cases, fitted.errors, fitted.left_out, strict=True
                )
            ],
            "fitted": _summary(fitted.errors), "left_out": _summary(fitted.left_out),
        }
    groups = write_cluster.step_errors(fitted) + write_cluster.curve_errors(curves)
    return {
        **steps, "collectives": _curves_as_json(curves),
        "groups": [
            {
                "group": group.name, "n": group.n, "fitted": _summary(group.fitted),
                "left_out": _summary(group.left_out), "by_preset": group.before,
            }
            for group in groups
        ],
        "doubts": _doubts(fitted, curves), "simulated": material.simulated,
        "skipped": [
            {"source": row.source, "line": row.line, "reason": row.reason}
            for row in material.skipped
        ],
    }


def _curves_as_json(curves: FittedCurves | None) -> dict[str, Any]:
    if curves is None:
        return {}
    return {
        "curves": [
            {
                "scope": curve.scope, "collective": curve.collective, "floor": curve.floor,
                "share": curve.share, "added": [list(term) for term in curve.added],
                "band": curve.band, "band_middle": curve.band_middle,
                "band_small": curve.band_small,
            }
            for curve in curves.curves
        ],
        "rows": [
            {
                "source": row.source, "line": row.line, "group": group, "error": error,
                "left_out": left_out,
            }
            for row, group, error, left_out in zip(
                curves.rows, curves.groups, curves.errors, curves.left_out, strict=True
            )
        ],
        "fitted": _summary(curves.errors), "left_out": _summary(curves.left_out),
    }


def _summary(errors: tuple[float, ...]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {
        "n": len(sizes), "median": median(sizes), "mean": fmean(sizes),
        "p95": accuracy.percentile(sizes, 95), "max": max(sizes),
    }


def _table(
    fitted: Fitted | None, curves: FittedCurves | None, skipped: list[Skipped]
) -> Iterator[str]:
    if fitted:
        yield f"{'constant':<32} {'of':<8} factor on its preset"
        for (kind, name), factor in fitted.factors.items():
            heard = write_cluster.kernels_heard(fitted, name)
            yield (
                f"{name:<32} {kind or 'all':<8} "
                f"{f'{factor:.3f}' if heard else 'as before: no row speaks of it'}"
            )
        yield from _errors(fitted.errors, fitted.left_out, write_cluster.step_errors(fitted))
        yield from write_cluster.worth(fitted)
    if curves:
        yield f"{'curve':<32} {'latency':>8} {'of link':>8}  extra time, half of it at"
        for curve in curves.curves:
            unit = "x" if curve.scope == "network" else "us"
            added = (
                ", ".join(
                    f"{times:.4g} {unit} at {half / 2**20:.3g} MiB" for times, half in curve.added
                )
                or "nothing"
            )
            yield (
                f"{curve.scope + ' ' + curve.collective:<32} {curve.floor:6.4g} {unit:<2} "
                f"{100 * curve.share:5.1f} %  {added}"
            )
        yield from _errors(curves.errors, curves.left_out, write_cluster.curve_errors(curves))
    for reason, rows in by_reason(skipped).items():
        yield f"skipped: {len(rows)} × {reason}"


def _errors(
    fitted: tuple[float, ...], left_out: tuple[float, ...], groups: list[GroupErrors]
) -> Iterator[str]:
    for label, errors in (("rows fitted", fitted), ("rows left out with their group", left_out)):
        summary = _summary(errors)
        shares = ", ".join(
            f"{name} {100 * summary[name]:.2f} %" for name in ("median", "mean", "p95", "max")
        )
        yield f"{label}: n {summary['n']}, {shares}"
    for group in groups:
        both = [_summary(errors) for errors in (group.fitted, group.left_out)]
        medians = [
            f"{100 * summary['median']:.1f} % (most {100 * summary['max']:.1f} %)"
            for summary in both
        ]
        yield (
            f"  {group.name[:70]:<70} n {group.n:>3}  fitted {medians[0]}, left out "
            f"{medians[1]}{group.by_preset}"
        )
