"""The table of a sweep: a row for each point, in the order of its axes; as text, CSV, lines of JSON
and Parquet.

The table depends on the points alone, and on nothing of how they were computed.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.analysis.sweep.axes import Axes, SweepError
from zsim.analysis.sweep.point import FIGURES, Row
from zsim.io import files
from zsim.io.data_frame import data_frame
from zsim.io.html_table import html_table
from zsim.io.units import format_bytes, format_time

ENDINGS = (".csv", ".jsonl", ".parquet")
MOST_LINES = 40
"""Rows of the printed table; the fastest of more."""


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """All points of the axes and a row for each: `status`, `reason` and figures (bytes of the
    fullest rank, nanoseconds of a step, tokens/s of all ranks)."""

    axes: Axes
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        """The row with most tokens/s among those that fit; None where none fits."""
        able = [row for row in self.rows if row["verdict"] == "FITS"]
        return max(able, key=lambda row: row["tokens_per_s"], default=None)

    @property
    def front(self) -> tuple[Row, ...]:
        """The Pareto front of tokens/s against needed bytes, from the fewest bytes on; of points
        that fit."""
        able = sorted(
            (row for row in self.rows if row["verdict"] == "FITS"),
            key=lambda row: (row["needed_bytes"], -row["tokens_per_s"]),
        )
        front: list[Row] = []
        for row in able:
            if not front or row["tokens_per_s"] > front[-1]["tokens_per_s"]:
                front.append(row)
        return tuple(front)

    def to_dict(self) -> dict[str, Any]:
        """Axes and rows, as `zsim sweep --json` prints them."""
        return {
            "axes": {key: list(values) for key, values in self.axes.values.items()},
            "rows": [dict(row) for row in self.rows],
        }

    def to_csv(self) -> str:
        """The table as CSV; values that are lists or tables as JSON."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in self.rows)
        return text.getvalue()

    def to_jsonl(self) -> str:
        """A line of JSON for each row."""
        return "".join(f"{json.dumps(row, allow_nan=False, default=str)}\n" for row in self.rows)

    def to_pandas(self) -> Any:
        """The table as a DataFrame; ZsimError without pandas."""
        return data_frame(self.rows, self._columns())

    def write(self, path: Path) -> None:
        """The table as its ending says; SweepError for another one, or without pyarrow for Parquet.
        """
        require(path)
        if path.suffix == ".parquet":
            files.write(path, self._parquet())
        else:
            files.write(path, self.to_csv() if path.suffix == ".csv" else self.to_jsonl())

    def _parquet(self) -> bytes:
        import pyarrow
        import pyarrow.parquet

        cells = [{name: _cell(value) for name, value in row.items()} for row in self.rows]
        text = [*self.axes.values, "status", "reason", "verdict"]  # an axis may mix its types
        kinds = [
            (name, pyarrow.string() if name in text else pyarrow.int64())
            for name in self._columns()
        ]
        for row in cells:
            row.update({n: str(row[n]) for n in text if row[n] is not None})
        sink = pyarrow.BufferOutputStream()
        table = pyarrow.Table.from_pylist(cells, schema=pyarrow.schema(kinds))
        pyarrow.parquet.write_table(table, sink)
        return bytes(sink.getvalue().to_pybytes())

    def _columns(self) -> list[str]:
        return ["point", *self.axes.values, "status", "reason", *FIGURES]

    def _repr_html_(self) -> str:
        """The points with most tokens/s as a table, for notebooks."""
        names = list(self.axes.values)
        able = [row for row in self.rows if row["status"] == "ok"]
        return html_table(
            repr(self)[1:-1], (*names, "", "needs", "step", "tokens/s"),
            [(*(_short(row[name]) for name in names), row["verdict"],
              format_bytes(row["needed_bytes"]), format_time(row["step_time_ns"]),
              f"{row['tokens_per_s']:,}")
             for row in sorted(able, key=lambda row: (-row["tokens_per_s"], row["point"]))],
            note=f"{len(self.rows) - len(able):,} of {len(self.rows):,} points are refused or "
                 "failed" if len(able) < len(self.rows) else "",
        )

    def __str__(self) -> str:
        """The table of `zsim sweep`."""
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return f"<Sweep of {len(self.rows):,} points over {', '.join(self.axes.values)}>"


def require(path: Path) -> None:
    """SweepError for a file of another ending, or of Parquet without pyarrow."""
    if path.suffix not in ENDINGS:
        raise SweepError(
            where=f"-o {path}", expected=f"a file that ends in {', '.join(ENDINGS)}",
            found=path.suffix or "no ending",
        )
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise SweepError(
                where=f"-o {path}", expected="pyarrow, which writes Parquet", found="none",
                remedy="pip install 'zsim[sweep]', or write .csv",
            ) from None


def _cell(value: Any) -> Any:
    return json.dumps(value, default=str) if isinstance(value, list | tuple | dict) else value


def _short(value: Any) -> str:
    """A value of an axis; a table by its values, as "fsdp2 false"."""
    if isinstance(value, dict):
        return " ".join(map(_short, value.values()))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines(sweep: Sweep) -> Iterator[str]:
    counts = Counter(row["status"] for row in sweep.rows)
    yield f"{len(sweep.rows):,} points: " + ", ".join(
        f"{number:,} {status}" for status, number in sorted(counts.items())
    )
    able = [row for row in sweep.rows if row["status"] == "ok"]
    fastest = sorted(able, key=lambda row: (-row["tokens_per_s"], row["point"]))
    chosen = sorted(fastest[:MOST_LINES], key=lambda row: row["point"])
    names = list(sweep.axes.values)
    widths = [
        max([len(name), *(len(_short(row[name])) for row in chosen)]) for name in names
    ]
    heads = "  ".join(f"{name:{width}}" for name, width in zip(names, widths, strict=True))
    yield f"   {heads}  {'':5} {'needs':>10} {'step':>10} {'tokens/s':>11}"
    front = {row["point"] for row in sweep.front}
    best = sweep.best
    for row in chosen:
        mark = "->" if best and row["point"] == best["point"] else (
            " *" if row["point"] in front else "  "
        )
        cells = "  ".join(
            f"{_short(row[name]):{width}}" for name, width in zip(names, widths, strict=True)
        )
        yield (
            f"{mark} {cells}  {row['verdict']:5} {format_bytes(row['needed_bytes']):>10} "
            f"{format_time(row['step_time_ns']):>10} {row['tokens_per_s']:>11,}"
        )
    if len(able) > len(chosen):
        yield f"   the {len(chosen)} with most tokens/s of {len(able):,}; -o FILE.csv has them all"
    yield "   * none that fits needs less and is as fast; -> most tokens/s that fits"
    reasons = Counter(row["reason"] for row in sweep.rows if row["status"] != "ok")
    for reason, number in reasons.most_common(8):
        yield f"   {number:,} x {reason}"
