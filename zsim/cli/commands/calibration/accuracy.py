"""`zsim accuracy`: from measurement files to error tables, a picture, and what a row was taken for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from zsim.calibration import accuracy, explain_row, plot
from zsim.calibration.accuracy import Accuracy
from zsim.calibration.data import measurements
from zsim.calibration.records import MeasurementError, Skipped
from zsim.calibration.row_predictions import Predicted
from zsim.cli import outputs
from zsim.cli.terminal import progress, say, tell, write_json
from zsim.cluster.cluster_presets import load_cluster
from zsim.errors import ZsimError
from zsim.io.units import format_bytes

MOST_REASONS = 8
"""Reasons that an error names of those for which nothing is predicted."""
GROUP = ("source", "kind", "gpu", "nodes", "n", "median", "mean", "p95", "max", "spearman", "bias")

IMPOSSIBLE = ("source", "line", "label", "measured", "least", "link")


class NoSuchRowError(ZsimError):
    """A row that is not in the file, or a text that names no row."""


def run(options: argparse.Namespace) -> int:
    """`zsim accuracy FOLDER`: predict every row and print the errors."""
    folder = Path(options.folder)
    defaults: dict[str, Any] = {
        "collective": options.collective or "", "cluster": options.cluster or "",
        "scenarios": Path(options.scenarios) if options.scenarios else None,
    }
    if options.cluster:
        load_cluster(options.cluster)  # refuses an unknown one before files are read
    if options.explain:
        return _explain(folder, options.explain, defaults, as_json=options.json)
    if options.plot:
        plot.require(Path(options.plot))
        outputs.require(Path(options.plot), option="--plot", apart_from=folder.glob("*"))
    with progress(f"accuracy of {folder}"):
        result = accuracy.accuracy(folder, say=tell, **defaults)
    if not result.rows:
        raise _nothing(folder, result)
    if options.plot:
        plot.write(result.rows, Path(options.plot))
    if options.json:
        write_json(as_json(result))
    for line in () if options.json else _table(result):
        say(line)
    return 0


def _nothing(folder: Path, result: Accuracy) -> MeasurementError:
    """The error of a folder without a measurement that can be predicted, with the reasons."""
    reasons = "; ".join(
        map(str.strip, (*_impossible(result), *_reasons(result.skipped, most=MOST_REASONS)))
    )
    return MeasurementError(
        where=str(folder), expected="a measured step, peak or collective that can be predicted",
        found=reasons or "none",
    )


def as_json(result: Accuracy) -> dict[str, Any]:
    """The object that `--json` prints: times in seconds, errors and bands as shares."""
    return {
        "groups": [{name: getattr(group, name) for name in GROUP} for group in result.groups],
        "rows": [
            {
                "source": row.source, "line": row.line, "kind": row.kind, "unit": row.unit,
                "predicted": row.predicted, "measured": row.measured, "error": row.error,
                "band": [row.predicted * factor for factor in row.band],
                "assumed": list(row.assumed),
            }
            for row in result.rows
        ],
        "pairs": [
            {
                "field": pair.field, "n": pair.n, "sign_right": pair.sign_right,
                "size": pair.size, "size_right": pair.size_right,
                "median_error_of_ratio": pair.median_error_of_ratio,
            }
            for pair in result.pairs
        ],
        "by_hidden": result.by_hidden and {
            "n": result.by_hidden.n, "slope": result.by_hidden.slope
        },
        "skipped": [
            {"source": row.source, "line": row.line, "reason": row.reason} for row in result.skipped
        ],
        "impossible": [
            {name: getattr(row, name) for name in IMPOSSIBLE} for row in result.impossible
        ],
    }


def _table(result: Accuracy) -> Iterator[str]:
    shares = " ".join(f"{name:>8}" for name in ("median", "mean", "p95", "max", "bias"))
    yield f"{'source':<30} {'kind':<28} {'gpu':<16} {'nodes':>5} {'n':>5} {shares} {'order':>6}"
    for group in result.groups:
        order = "-" if group.spearman is None else f"{group.spearman:.3f}"
        shares = " ".join(
            f"{100 * value:7.1f}%"
            for value in (group.median, group.mean, group.p95, group.max, group.bias)
        )
        yield (
            f"{group.source[:30]:<30} {group.kind.removeprefix('collective ')[:28]:<28} "
            f"{group.gpu[:16]:<16} "
            f"{group.nodes:>5} {group.n:>5} {shares} {order:>6}"
        )
    if result.rows:
        inside = sum(
            row.band[0] <= row.measured / row.predicted <= row.band[1] for row in result.rows
        )
        yield (
            f"\n{inside} of {len(result.rows)} measurements lie within their band. The largest "
            f"misses:"
        )
        for row in sorted(result.rows, key=lambda row: -abs(row.error))[:5]:
            yield (
                f"  {row.source} line {row.line}: predicted {_figure(row, row.predicted)}, "
                f"measured {_figure(row, row.measured)}, "
                f"{100 * row.error:+.1f} %; {_fields(row)}"
            )
    if result.pairs:
        yield "\npairs of rows that differ in one field:"
    for pair in result.pairs:
        sign, third = (
            "-" if share is None else f"{100 * share:.0f} %"
            for share in (pair.sign_right, pair.size_right)
        )
        size = "-" if pair.size is None else f"{pair.size:.2f}"
        yield (
            f"  {pair.field:<24} n {pair.n:>6}   sign right {sign:>6}   size {size:>5} of the "
            f"measured, {third:>6} within a third   median error of ratio "
            f"{100 * pair.median_error_of_ratio:.1f} %"
        )
    if result.by_hidden:
        yield (
            f"\nerror of {result.by_hidden.n} steps against their share of hidden communication: "
            f"slope {result.by_hidden.slope:+.3f}"
        )
    if result.impossible:
        yield (f"\nfaster than their links can be, {len(result.impossible)} rows, which no figure "
               f"above includes:")
    yield from _impossible(result)
    if result.skipped:
        yield f"\nskipped, {len(result.skipped)} rows:"
    yield from (f"  {reason}" for reason in _reasons(result.skipped))


def _impossible(result: Accuracy) -> Iterator[str]:
    """Each row that no link could carry, with the time that its links need."""
    for row in result.impossible:
        yield (f"  {row.source} line {row.line}: {row.label}, measured {row.measured:.6g} s; "
               f"{row.link} need {row.least:.6g} s")


def _reasons(skipped: Sequence[Skipped], *, most: int | None = None) -> Iterator[str]:
    """Each reason, or the first `most`, with how many rows have it and where the first is."""
    for reason, rows in islice(by_reason(skipped).items(), most):
        more = ", …" if len(rows) > 1 else ""
        yield f"{len(rows):>5} × {reason}  ({rows[0].source} line {rows[0].line}{more})"


def _figure(row: Predicted, value: float) -> str:
    return format_bytes(round(value)) if row.unit == "B" else f"{value:.6g} s"


def by_reason(skipped: Sequence[Skipped]) -> dict[str, list[Skipped]]:
    """Skipped rows by their reason."""
    rows_of: dict[str, list[Skipped]] = {}
    for row in skipped:
        rows_of.setdefault(row.reason, []).append(row)
    return rows_of


def _fields(row: Predicted) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.fields.items() if value)[:160]


def _explain(folder: Path, position: str, defaults: dict[str, Any], *, as_json: bool) -> int:
    """`--explain FILE:LINE`: the scenario of one row, or its collective, and what was assumed."""
    name, _, line = position.rpartition(":")
    listed = measurements.files(folder).files
    wanted = [each for each in listed if name in (each[1], each[1].rpartition(".")[0])]
    wanted = wanted or [each for each in listed if each[0].name == name]
    for path, known in wanted if line.isdecimal() and len(line) < 10 else ():
        try:
            rows = measurements.rows(path, name=known, **defaults)
        except MeasurementError as error:
            rows = [Skipped(source=known, line=int(line), reason=str(error))]
        of_line = [row for row in rows if row.line == int(line)]
        of_line += [
            row for row in rows if isinstance(row, Skipped) and row.first <= int(line) <= row.last
        ]
        if of_line:
            say(explain_row.text(of_line[0], as_json=as_json).rstrip("\n"))
            return 0
    raise NoSuchRowError(
        where=f"--explain {position[:60]}",
        expected="FILE.csv:LINE of a measurement in the folder, the line as an editor counts it",
        found="no such row",
    )
