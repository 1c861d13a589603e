"""The table of a sweep: a row for each point, in the order of its axes; as text, CSV, lines of JSON
and Parquet.

The table depends on the points alone, and on nothing of how they were computed.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.analysis.sweep import printed
from zsim.analysis.sweep.axes import Axes, SweepError
from zsim.analysis.sweep.point import FIGURES, Row
from zsim.errors import listed
from zsim.io import files
from zsim.io.notebook.data_frame import data_frame

ENDINGS = (".csv", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """All points of the axes and a row for each: `status`, `reason` and figures (bytes of the
    fullest rank, nanoseconds of a step, tokens/s of all ranks)."""

    axes: Axes
    rows: tuple[Row, ...]
    num_resumed: int = field(default=0, compare=False)
    """Number of points that were taken from a journal, and not computed again."""

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

    def plot(self) -> Any:
        """matplotlib's Figure of tokens/s against needed memory, by values of the first axis;
        SweepError without matplotlib, or where no point was computed."""
        from zsim.analysis.sweep import plot  # few sweeps are drawn

        return plot.figure(self)

    def _repr_html_(self) -> str:
        """The points as a table for notebooks: those that fit first, by tokens/s."""
        return printed.as_html(self)

    def __str__(self) -> str:
        """The table of `zsim sweep`."""
        return "\n".join(printed.lines(self))

    def __repr__(self) -> str:
        return f"<Sweep of {len(self.rows):,} points over {', '.join(self.axes.values)}>"


def require(path: Path) -> None:
    """SweepError for a file of another ending, or of Parquet without pyarrow."""
    if path.suffix not in ENDINGS:
        raise SweepError(
            where=f"-o {path}", expected=f"a file that ends in {listed(ENDINGS)}",
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
