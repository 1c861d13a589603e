"""One table of measurements: each row is a scenario, or a collective on a cluster, and its figures.

Columns are the dotted keys of a scenario file, and a row passes the very checks of one. The
README of `zsim.calibration` lists the other columns. Nothing is guessed: an empty cell is a key
left out.
"""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import Any, TypeVar, get_args

from zsim.calibration.records import (
    NUL,
    WHOLE_NETWORK,
    Collective,
    MeasurementError,
    Step,
    TableError,
    content,
    decoded,
)
from zsim.cluster.collectives.nccl.tuner import Algorithm
from zsim.errors import Caveat, ScenarioError, ZsimError, listed, shown
from zsim.io import limits
from zsim.io.units import parse_bytes, parse_time
from zsim.scenario import scenario
from zsim.scenario.keys.table_checks import did_you_mean, validated
from zsim.scenario.keys.tables import ClusterTable, ScenarioTable
from zsim.scenario.parts.cluster_table import made_cluster
from zsim.scenario.scenario import Scenario

MAX_ROWS, MAX_COLUMNS, MAX_CELL = 20_000, 200, 2000
MOST_PROBLEMS = 40
"""Problems of one table that are printed."""
MOST_WIDENED = 10.0
OR, MOST_READINGS = " | ", 8
"""Mark between the values of a cell of which one ran, and most scenarios that a row may be."""
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
TIME = "measured.step_time"
ALLOCATED, RESERVED = "measured.peak_allocated", "measured.peak_reserved"
ABOUT = ("assumed", "widens", "network.least", "network.most", "source", "group", "note")
"""Columns of every table."""
MEASURED = (TIME, ALLOCATED, RESERVED)
OF_COLLECTIVE = (
    "collective", "bytes", "measured.time", "nccl.algorithm", "nccl.nvls", "nccl.through_torch"
)
PLAIN = ("frozen", "steps", "seed")
"""Keys of a scenario that are in no table."""
TABLES = tuple(
    name for name in ScenarioTable.model_fields if name not in (*PLAIN, "description", "expect")
)
_LITERAL = re.compile(r"true|false|[+-]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?|[\[{\"'].*")
Value = TypeVar("Value")


def is_table(data: bytes) -> bool:
    """True where the first line names a column of measurements, parted from others as it may be."""
    first = decoded(data[:65536], errors="replace").partition("\n")[0]
    return re.search(r'(?:^|[,;\t])\s*"?measured\.', first) is not None


def read(path: Path, *, name: str = "") -> list[Step | Collective]:
    """The rows of the table at `path`, called `name` in messages.

    MeasurementError for a file that is no CSV, TableError for one with problems, all listed.
    """
    return parse(content(path), where=name or path.name, folder=path.parent)


def parse(data: bytes, *, where: str, folder: Path | None = None) -> list[Step | Collective]:
    """The rows of the table in `data`; files that cells name are looked for in `folder`."""
    try:
        reader = csv.reader(io.StringIO(decoded(data), newline=""), strict=True)
        header, *lines = [(reader.line_num, cells) for cells in reader] or [(1, [])]
    except (UnicodeDecodeError, csv.Error) as error:
        raise MeasurementError(
            where=where, expected="a CSV table in UTF-8", found=str(error)[:200]
        ) from None
    columns = [cell.strip() for cell in header[1]]
    problems = {problem: [header[0]] for problem in _of_header(columns, num_rows=len(lines))}
    rows: list[Step | Collective] = []
    for line, cells in () if problems else lines:
        if any(cells):
            row = _Row(cells, columns, where=where, line=line, folder=folder)
            rows.append(row.collective() if "collective" in columns else row.step())
            for problem in row.problems:
                problems.setdefault(problem, []).append(line)
    if not (problems or rows):
        problems["expected rows under the header, found none"] = [header[0]]
    if problems:
        listed = [f"{where} {_lines(at)}: {problem}" for problem, at in problems.items()]
        more = len(listed) - MOST_PROBLEMS
        raise TableError(
            (*listed[:MOST_PROBLEMS], *([f"{where}: {more} more problems"] if more > 0 else []))
        )
    return rows


def _lines(lines: list[int]) -> str:
    return f"line {lines[0]}" + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")


def _of_header(columns: list[str], *, num_rows: int) -> list[str]:
    """Problems of the columns of a table, and of its size."""
    if len(columns) > MAX_COLUMNS or num_rows > MAX_ROWS:
        return [f"expected at most {MAX_COLUMNS} columns and {MAX_ROWS:,} rows, found "
                f"{len(columns):,} and {num_rows:,}"]
    for separator, name in (";", "semicolons"), ("\t", "tabs"):
        if len(columns) < len(",".join(columns).split(separator)):
            return [f"expected commas between columns, found {name}"]
    own = OF_COLLECTIVE if "collective" in columns else MEASURED
    tables = ("cluster",) if "collective" in columns else TABLES
    problems = [
        f"{column[:60] or 'a column'}: expected one column of that name, found {count}"
        for column, count in Counter(columns).items()
        if count > 1
    ]
    for column in columns:
        is_key = re.fullmatch(r"\w+(?:\.\w+)+", column, re.ASCII) is not None
        if column in (*own, *ABOUT, *(PLAIN if own is MEASURED else ())) or (
            is_key and column.partition(".")[0] in tables
        ):
            continue
        known = [*own, *ABOUT, *(f"{name}." for name in tables)]
        table, dot, _ = column.partition(".")
        word = f"{table}." if dot and table not in ("measured", "network", "nccl") else column
        problems.append(f"{column[:60] or 'a column without a name'}: unknown column"
                        f"{did_you_mean(word, known)}")
    needed = ("collective", "bytes", "measured.time") if own is OF_COLLECTIVE else ()
    problems += [f"{name}: missing column" for name in needed if name not in columns]
    if not set(columns) & {*MEASURED, "measured.time"}:
        problems.append(f"{TIME}: missing column; a table has what was measured: "
                        f"{listed(MEASURED)}")
    return problems


class _Row:
    """The cells of one line by column, and the problems with them."""

    def __init__(
        self, cells: list[str], columns: list[str], *, where: str, line: int, folder: Path | None
    ) -> None:
        self.problems: list[str] = []
        self.folder, self.line, self.where = folder, line, where
        self.cells = {
            column: cell.strip() for column, cell in zip(columns, cells, strict=False)
            if cell.strip()
        }
        if len(cells) != len(columns):
            self.problems.append(f"expected {len(columns)} cells as the header has columns, found "
                                 f"{len(cells)}")
        for column, cell in self.cells.items():
            if NUL in cell:
                self.problems.append(f"{column}: expected text, found a NUL byte in it; save "
                                     "the table as UTF-8 text")
            elif len(cell) > MAX_CELL:
                self.problems.append(f"{column}: expected at most {MAX_CELL:,} characters, found "
                                     f"{len(cell):,}")

    def step(self) -> Any:
        """The row as a Step; None with problems."""
        sizes = {
            name: self.read(column, _positive(parse_bytes))
            for name, column in (("allocated", ALLOCATED), ("reserved", RESERVED))
        }
        peaks = {name: nbytes for name, nbytes in sizes.items() if nbytes is not None}
        nanoseconds, about = self.read(TIME, _positive(parse_time)), self.about()
        if not self.problems and not (nanoseconds or peaks):
            self.problems.append(f"{TIME}: expected {listed(MEASURED)}, found none")
        table = {key: text for key, text in self.cells.items() if key not in (*MEASURED, *ABOUT)}
        made = [self.scenario(reading) for reading in self.readings(table)]
        if self.problems:
            return None
        first, *others = [each for each in made if each is not None]
        return Step(
            **about, scenario=first, seconds=nanoseconds / 1e9 if nanoseconds else None,
            peaks=peaks, fields=table, others=tuple(others),
        )

    def readings(self, table: Mapping[str, str]) -> list[dict[str, str]]:
        """The cells of each scenario that the row may be: a cell `true | false` is either."""
        values = {key: text.split(OR) for key, text in table.items()}
        open_keys = [key for key, each in values.items() if len(each) > 1]
        if open_keys and "assumed" not in self.cells:
            self.problems.append(f"assumed: expected why {', '.join(open_keys)} is left open, "
                                 "found none")
        if (count := prod(map(len, values.values()))) > MOST_READINGS:
            self.problems.append(f"{', '.join(open_keys)}: expected at most {MOST_READINGS} "
                                 f"scenarios that the row may be, found {count}")
        if self.problems:
            return []
        return [dict(zip(values, each, strict=True)) for each in product(*values.values())]

    def scenario(self, table: Mapping[str, str]) -> Scenario | None:
        """The scenario of the row's cells; None after adding its problems."""
        try:
            return _scenario(tuple(table.items()), str(self.folder) if self.folder else "")
        except ScenarioError as error:
            self.problems += error.under("row")
        return None

    def collective(self) -> Any:
        """The row as a Collective; None with problems."""
        op = self.read("collective", _one_of(OPS), needed=True)
        nbytes = self.read("bytes", _positive(_nbytes), needed=True)
        nanoseconds = self.read("measured.time", _positive(parse_time), needed=True)
        algorithm = self.read("nccl.algorithm", _one_of(get_args(Algorithm)))
        nvls = self.read("nccl.nvls", _boolean)
        through_torch, about = self.read("nccl.through_torch", _boolean), self.about()
        table = {key: text for key, text in self.cells.items() if key.startswith("cluster.")}
        whole = nested(table, self.problems).get("cluster", {})
        made = validated(ClusterTable, whole, prefix="cluster", problems=self.problems)
        if self.problems or made is None:
            return None
        try:
            cluster = made_cluster(made, self.folder)
        except ScenarioError as error:
            self.problems += error.problems
            return None
        if cluster.nccl is None or cluster.num_ranks < 2:
            self.problems.append("cluster: expected two ranks or more whose collectives are "
                                 f"NCCL's, found {cluster.num_ranks} of {cluster.name}")
        return Collective(
            **about, op=op or "", nbytes=nbytes or 0, seconds=(nanoseconds or 0) / 1e9,
            cluster=cluster, algorithm=algorithm, nvls=nvls is not False,
            through_torch=bool(through_torch),
        )

    def about(self) -> dict[str, Any]:
        """Fields of every kind of row: caveats, network, source and group."""
        widens = self.read("widens", _share(MOST_WIDENED)) or 0.0
        network = (
            self.read("network.least", _share(1.0)), self.read("network.most", _share(1000.0))
        )
        assumed = self.cells.get("assumed", "")
        if widens and not assumed:
            self.problems.append("assumed: expected the reason why the band is wider, found none")
        elif (network[0] is None) != (network[1] is None):
            self.problems.append("network.least, network.most: expected both or neither, found one")
        elif network[1] is not None and network[1] < 1:
            self.problems.append(f"network.most: expected 1 or more, found {network[1]:g}")
        first, *others = [part.strip() for part in assumed.split(";")]
        caveats = [Caveat(first, widens=widens), *map(Caveat, others)] if assumed else []
        return {
            "source": self.where, "line": self.line, "caveats": tuple(caveats),
            "network": WHOLE_NETWORK if None in network else network,
            "group": self.cells.get("group", ""), "origin": self.cells.get("source", ""),
        }

    def read(
        self, column: str, parsed: Callable[[str], Value], *, needed: bool = False
    ) -> Value | None:
        """The value of a cell; None for an empty one, and after adding a problem."""
        text = self.cells.get(column)
        if text is None:
            if needed:
                self.problems.append(f"{column}: missing")
            return None
        try:
            return parsed(text)
        except (ZsimError, ValueError, ArithmeticError) as error:
            known = f"expected {error}, found {shown(text)}"
            complaint = error.complaint if isinstance(error, ZsimError) else known
            self.problems.append(f"{column}: {complaint}")
        return None


def _positive(parsed: Callable[[str], int]) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = parsed(text)
        if number <= 0:
            raise ValueError("more than nothing")
        return number

    return read


def _nbytes(text: str) -> int:
    """Bytes as a whole number or with their unit."""
    return int(text) if re.fullmatch(r"\d{1,15}", text, re.ASCII) else parse_bytes(text)


def _share(most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not (isfinite(number) and 0 <= number <= most):
            raise ValueError(f"a number from 0 to {most:g}")
        return number

    return read


def _one_of(names: tuple[str, ...]) -> Callable[[str], Any]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"{listed(names)}{did_you_mean(text, names)}")
        return text

    return read


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


def nested(cells: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """The tables that dotted keys make: {"model.preset": "a"} is {"model": {"preset": "a"}}.

    A key below one that has a value itself is in `problems`.
    """
    tables: dict[str, Any] = {}
    for key, text in cells.items():
        *path, last = key.split(".")
        above = [".".join(path[:end]) for end in range(1, len(path) + 1)]
        taken = next((name for name in above if name in cells), None)
        if taken is not None:
            problems.append(f"{key}: expected one of {taken} and {key}, found both")
            continue
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value(text)
    return tables


def value(text: str) -> Any:
    """A cell as TOML has it: true, 4, 1.5, ["a"], { k = 1 }; any other is a string."""
    if not _LITERAL.fullmatch(text) or limits.scan(text):
        return text
    try:
        return tomllib.loads(f"cell = {text}")["cell"]
    except (ValueError, RecursionError):
        return text


@lru_cache(maxsize=4096)
def _scenario(cells: tuple[tuple[str, str], ...], folder: str) -> Scenario:
    """The scenario of a row's cells, which many rows share."""
    problems: list[str] = []
    tables = nested(dict(cells), problems)
    if problems:
        raise ScenarioError(tuple(problems))
    return scenario.from_tables(tables, where="row", folder=Path(folder) if folder else None)
