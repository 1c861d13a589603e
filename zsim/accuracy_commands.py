"""`zsim accuracy` and `zsim calibrate`: from measurement files to error tables, a picture, the scenario of a row, a cluster's constants."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim import accuracy, calibrate, cluster_file, explanations, measurements, plots
from zsim.accuracy import Accuracy, Predicted
from zsim.errors import ZsimError
from zsim.measurements import Skipped
from zsim.report import progress, say, tell, write_json

GROUP = ("source", "kind", "gpu", "nodes", "n", "median", "mean", "p95", "max", "spearman", "bias")


class NoSuchRowError(ZsimError):
    """A row that is not in the file, or a name that says none."""


def show(options: argparse.Namespace) -> int:
    """`zsim accuracy FOLDER`: predict every row and print the errors."""
    folder = Path(options.folder)
    if options.explain:
        return _explain(folder, options.explain, as_json=options.json)
    with progress(f"accuracy of {folder}"):
        found = accuracy.accuracy(folder, say=tell)
    if options.plot:
        plots.write(found.rows, Path(options.plot))
    if options.json:
        write_json(as_json(found))
    for line in () if options.json else _table(found):
        say(line)
    return 0


def as_json(found: Accuracy) -> dict[str, Any]:
    """The object that `--json` prints: times in seconds, errors and bands as shares."""
    return {
        "groups": [
            {name: getattr(group, name) for name in GROUP}
            for group in found.groups
        ],
        "rows": [
            {
                "source": row.source,
                "line": row.line,
                "kind": row.kind,
                "predicted": row.predicted,
                "measured": row.measured,
                "error": row.error,
                "band": [row.predicted * factor for factor in row.band],
                "assumed": list(row.assumed),
            }
            for row in found.rows
        ],
        "pairs": [
            {"field": pair.field, "n": pair.n, "sign_right": pair.sign_right, "median_error_of_ratio": pair.median_error_of_ratio}
            for pair in found.pairs
        ],
        "skipped": [{"source": row.source, "line": row.line, "reason": row.reason} for row in found.skipped],
    }


def _table(found: Accuracy) -> Iterator[str]:
    shares = " ".join(f"{name:>8}" for name in ("median", "mean", "p95", "max", "bias"))
    yield f"{'source':<30} {'kind':<28} {'gpu':<16} {'nodes':>5} {'n':>5} {shares} {'order':>6}"
    for group in found.groups:
        order = "-" if group.spearman is None else f"{group.spearman:.3f}"
        shares = " ".join(f"{100 * value:7.1f}%" for value in (group.median, group.mean, group.p95, group.max, group.bias))
        yield f"{group.source[:30]:<30} {_kind(group.kind):<28} {group.gpu[:16]:<16} {group.nodes:>5} {group.n:>5} {shares} {order:>6}"
    if found.rows:
        inside = sum(row.band[0] <= row.measured / row.predicted <= row.band[1] for row in found.rows)
        yield f"\n{inside} of {len(found.rows)} measurements lie within their band. The largest misses:"
        for row in sorted(found.rows, key=lambda row: -abs(row.error))[:5]:
            yield f"  {_place(row)}: predicted {row.predicted:.6g} s, measured {row.measured:.6g} s, {100 * row.error:+.1f} %; {_said(row)}"
    if found.pairs:
        yield "\npairs of rows that differ in one field:"
    for pair in found.pairs:
        sign = "-" if pair.sign_right is None else f"{100 * pair.sign_right:.0f} %"
        yield f"  {pair.field:<24} n {pair.n:>6}   sign right {sign:>6}   median error of ratio {100 * pair.median_error_of_ratio:.1f} %"
    if found.skipped:
        yield f"\nskipped, {len(found.skipped)} rows:"
    for reason, rows in _by_reason(found.skipped).items():
        yield f"  {len(rows):>5} × {reason}  ({rows[0].source} line {rows[0].line}{', …' if len(rows) > 1 else ''})"


def _kind(kind: str) -> str:
    return kind.removeprefix("collective ").replace("shared network", "shared")


def _by_reason(skipped: tuple[Skipped, ...]) -> dict[str, list[Skipped]]:
    found: dict[str, list[Skipped]] = {}
    for row in skipped:
        found.setdefault(row.reason, []).append(row)
    return found


def _place(row: Predicted) -> str:
    return f"{row.source} line {row.line}"


def _said(row: Predicted) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.fields.items() if value)[:160]


def _explain(folder: Path, asked: str, *, as_json: bool) -> int:
    """`--explain FILE:LINE`: the scenario of one row, or what a collective or a product was taken for, and what was assumed."""
    name, _, line = asked.rpartition(":")
    for path in measurements.files(folder):
        if path.name not in (name, f"{name}.csv") or not line.isdecimal():
            continue
        found = [row for row in measurements.rows(path) if row.line == int(line)]
        if found:
            sys.stdout.write(explanations.text(found[0], as_json=as_json))
            return 0
    raise NoSuchRowError(
        where=f"--explain {asked[:60]}",
        expected="FILE.csv:LINE of a measurement in the folder, the line as an editor counts it",
        found="no such row",
    )


def calibrated(options: argparse.Namespace) -> int:
    """`zsim calibrate --from FILE…`: constants fitted to measured steps, their errors, and with --out a cluster's file."""
    rows: list[measurements.Step | Skipped] = []
    for path in map(Path, options.files):
        columns, records = measurements.read(path)
        source = measurements.source_of(columns)
        if not source:
            raise NoSuchRowError(where=str(path), expected="columns of a known source of training steps", found=", ".join(columns)[:200])
        rows += measurements.steps(source, records, file=path.name)
    with progress("calibration"):
        cases, skipped = calibrate.prepared(rows, say=tell)
        fitted = calibrate.fit(cases, say=tell)
    names = ", ".join(dict.fromkeys(Path(name).name for name in options.files))
    if options.out:
        _write(Path(options.out), cluster_file.text(options.cluster, fitted, source=names))
    if options.json:
        write_json(_fit_as_json(fitted, skipped))
    for line in () if options.json else _fit_table(fitted, skipped):
        say(line)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NoSuchRowError(where=str(path), expected="a file that can be written", found=str(error.strerror)) from None


def _fit_as_json(fitted: calibrate.Fitted, skipped: list[Skipped]) -> dict[str, Any]:
    return {
        "constants": [{"generation": kind, "name": name, "factor": factor} for (kind, name), factor in fitted.factors.items()],
        "rows": [
            {"source": case.step.source, "line": case.step.line, "group": list(case.group), "error": error, "left_out": left_out}
            for case, error, left_out in zip(fitted.cases, fitted.errors, fitted.left_out, strict=True)
        ],
        "fitted": _summary(fitted.errors),
        "left_out": _summary(fitted.left_out),
        "skipped": [{"source": row.source, "line": row.line, "reason": row.reason} for row in skipped],
    }


def _summary(errors: tuple[float, ...]) -> dict[str, float]:
    ordered = sorted(map(abs, errors))
    return {
        "n": len(ordered),
        "median": accuracy.percentile(ordered, 0.5),
        "mean": sum(ordered) / len(ordered),
        "p95": accuracy.percentile(ordered, 0.95),
        "max": ordered[-1],
    }


def _fit_table(fitted: calibrate.Fitted, skipped: list[Skipped]) -> Iterator[str]:
    yield f"{'constant':<32} {'of':<8} factor on its preset"
    for (kind, name), factor in fitted.factors.items():
        yield f"{name:<32} {kind or 'all':<8} {factor:.3f}"
    for words, errors in (("rows fitted", fitted.errors), ("rows left out with their group", fitted.left_out)):
        found = _summary(errors)
        shares = ", ".join(f"{name} {100 * found[name]:.2f} %" for name in ("median", "mean", "p95", "max"))
        yield f"{words}: n {found['n']}, {shares}"
    for reason, rows in _by_reason(tuple(skipped)).items():
        yield f"skipped: {len(rows)} × {reason}"
