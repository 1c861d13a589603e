"""Published measurements: files in many schemas, each row a training step, a collective or a
product, with what was measured of it.

Each schema is a file here that says how a row maps to a scenario, and a line in the table below.
The schema is told by the columns, so folders and files may be called anything, and rows that nobody
has seen of a known schema can be read; only where columns tell two schemas alike does a file's name
decide, if it is a published one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from zsim.calibration.nccl_tests import files as nccl_files
from zsim.calibration.nccl_tests import log_prefixes
from zsim.calibration.nccl_tests.rows import NcclRow
from zsim.calibration.rows.checks import unknown
from zsim.calibration.rows.records import (
    MISSING,
    OTHER_FIELDS,
    MeasurementError,
    Record,
    RowError,
    Skipped,
    Step,
    content,
    decoded,
    read,
    table_of,
)
from zsim.calibration.tables import columns as headers
from zsim.calibration.tables import (
    fms_fsdp,
    llm_foundry,
    matmul_peaks,
    nanotron,
    torchtitan,
    vtrain,
)
from zsim.calibration.tables.matmul_peaks import Product

MAX_FILES = 1000
SUFFIXES = (".csv", ".tsv", ".txt", ".log", ".out", ".json")
NO_ROWS = "no rows under its header"
Row = Step | NcclRow | Product
Made = TypeVar("Made", Step, Product)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A schema of training steps: the columns that tell it, of each of `one_of` at least one, and
    what makes a step of a record."""

    columns: frozenset[str]
    one_of: tuple[frozenset[str], ...]
    step: Callable[..., Step]

    def is_of(self, columns: frozenset[str]) -> bool:
        """Whether a table with these columns is one of this source."""
        return self.columns <= columns and all(some & columns for some in self.one_of)


SOURCES: dict[str, Source] = {
    "llm-foundry": Source(
        columns=llm_foundry.COLUMNS, one_of=llm_foundry.ONE_OF, step=llm_foundry.step
    ),
    "torchtitan": Source(
        columns=torchtitan.COLUMNS, one_of=torchtitan.ONE_OF, step=torchtitan.step
    ),
    "fms-fsdp": Source(columns=fms_fsdp.COLUMNS, one_of=fms_fsdp.ONE_OF, step=fms_fsdp.step),
    "nanotron": Source(columns=nanotron.COLUMNS, one_of=nanotron.ONE_OF, step=nanotron.step),
    "megatron-deepspeed": Source(columns=vtrain.COLUMNS, one_of=vtrain.ONE_OF, step=vtrain.step),
}


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a folder that may hold measurements, each with its name below the folder, and
    those that are not read."""

    files: tuple[tuple[Path, str], ...]
    skipped: tuple[Skipped, ...]


def files(folder: Path) -> Found:
    """The tables, logs and JSON files of a folder and of the folders in it, or the one file given;
    MeasurementError where there are none.

    Everything else is skipped by name, but what begins with a dot.
    """
    expected = "a folder with CSV files of measurements, or logs of nccl-tests"
    if folder.is_file():
        return Found(((folder, folder.name),), ())
    if not folder.exists():
        raise MeasurementError(
            where=str(folder), expected=f"{expected}, or one such file", found=MISSING
        )
    paths: list[tuple[Path, str]] = []
    skipped: list[Skipped] = []
    for path in _below(folder):
        name = path.relative_to(folder).as_posix()
        if reason := _no_plain_file(path):
            skipped.append(Skipped(source=name, line=1, reason=reason))
        elif path.suffix.lower() not in SUFFIXES:
            skipped.append(Skipped(source=name, line=1, reason=f"no file of measurements: its "
                                                               f"name does not end in "
                                                               f"{', '.join(SUFFIXES)}"))
        elif len(paths) >= MAX_FILES:
            skipped.append(Skipped(source=name, line=1, reason=f"more than {MAX_FILES:,} files in "
                                                               f"the folder"))
        else:
            paths.append((path, name))
    if not paths:
        raise MeasurementError(
            where=str(folder), expected=expected,
            found=f"none among {len(skipped)} files" if skipped else "none",
        )
    return Found(tuple(paths), tuple(skipped))


def _below(folder: Path) -> Iterator[Path]:
    """Files below a folder in order, and folders that links lead to or that cannot be listed;
    nothing that begins with a dot."""
    closed: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        yield from (Path(place) / name for name in folders if (Path(place) / name).is_symlink())
        yield from (Path(place) / name for name in sorted(names) if not name.startswith("."))
    yield from (Path(error.filename) for error in closed)


def _no_plain_file(path: Path) -> str:
    """Why what is called `path` is not opened, as it may lead elsewhere, to nothing, or to
    something without an end; "" where it is."""
    if path.is_dir():
        return (
            "a link to a folder, not followed: give that one by itself"
            if path.is_symlink()
            else "a folder that cannot be listed"
        )
    if not path.exists():
        return "a link to a file that is not here"
    return "" if path.is_file() else "no plain file, but a pipe or a device"


def rows(path: Path, *, name: str = "", collective: str = "") -> list[Row | Skipped]:
    """Every row of a file as what was measured, or why it is skipped; MeasurementError for a file
    that is no table and no nccl-tests.

    A file without rows, or whose columns nobody knows, is one row that is skipped. `name` is what
    rows call the file, `collective` what a log of nccl-tests ran that does not say it.
    """
    name = name or path.name
    return _rows(path, name, collective) or [Skipped(source=name, line=1, reason=NO_ROWS)]


def _rows(path: Path, name: str, collective: str) -> list[Row | Skipped]:
    data = content(path)
    text = log_prefixes.plain(decoded(data, errors="replace"))
    if not text.strip():
        return [Skipped(source=name, line=1, reason="an empty file")]
    if re.match(r'\s*\{\s*"(run|schema_version)"', text):
        return [Skipped(source=name, line=1, reason="a saved Run, whose scenario `zsim "
                                                    "calibrate` and `zsim compare` read")]
    if nccl_files.is_csv(text) or _is_nccl_tests(text) or path.suffix.lower() == ".json":
        return _collectives(text, name, collective)
    columns, records = table_of(data, where=str(path))
    filled = {
        column for record in records for column, value in record.fields.items() if value.strip()
    }
    schemas = sources_of(columns, file=name, filled=filled)
    if len(schemas) == 1:
        return list(steps(schemas[0], records, file=name))
    if matmul_peaks.COLUMNS.issubset(columns):
        return list(each(records, name, matmul_peaks.product))
    reason = f"columns of no known source: {', '.join(columns)[:200] or 'the first line is empty'}"
    if schemas:
        known = ", ".join(
            f"{published}.csv" for published, schema in headers.FILES.items() if schema in schemas
        )
        reason = (
            f"columns of {' and of '.join(schemas)} alike: which of them ran is told by a file's "
            f"name, {known}"
        )
    last = records[-1].line if records else 1
    return [
        Skipped(
            source=name, line=1,
            reason=reason + (f" ({len(records)} rows)" if len(records) > 1 else ""), first=1,
            last=last,
        )
    ]


def readable(path: Path, *, name: str, collective: str = "") -> list[Row | Skipped]:
    """`rows` of one file among others: one that is damaged is skipped by name, with how many lines
    it has."""
    try:
        return rows(path, name=name, collective=collective)
    except MeasurementError as error:
        return [Skipped(source=name, line=1, reason=f"expected {error.expected}, found "
                                                    f"{error.found}{_lines(path)}")]


def digest(path: Path) -> bytes:
    """What two files have in common that hold the same bytes; MeasurementError for one that cannot
    be read."""
    return sha256(content(path)).digest()


def copy_of(first: str, *, name: str) -> Skipped:
    """Why a file is skipped that holds the same as the one called `first`; the same row twice in
    one file was measured twice."""
    return Skipped(source=name, line=1, reason=f"holds the same as {first}: counted once")


def _lines(path: Path) -> str:
    try:
        count = content(path).count(b"\n")
    except MeasurementError:
        return ""
    return f" ({max(0, count - 1)} rows)" if count > 2 else ""


def _is_nccl_tests(text: str) -> bool:
    """nccl-tests' own output: a JSON object, or text with its comments, perhaps behind a launcher's
    words."""
    return log_prefixes.holds_log(text) or (
        text.lstrip().startswith("{") and nccl_files.is_json(text)
    )


def _collectives(text: str, name: str, collective: str) -> list[Row | Skipped]:
    found = nccl_files.read_any(text, source=name, collective=collective)
    skipped = [
        Skipped(
            source=name,
            line=one.line,
            reason=f"{one.reason} ({one.count} rows)" if one.count > 1 else one.reason,
            first=one.first,
            last=one.last,
        )
        for one in found.skipped
    ]
    return [*found.rows, *skipped]


def source_of(columns: tuple[str, ...], *, file: str = "") -> str:
    """The name of the schema that these columns are, "" for none, or where they are of several
    alike."""
    found = sources_of(columns, file=file)
    return found[0] if len(found) == 1 else ""


def sources_of(
    columns: tuple[str, ...], *, file: str = "", filled: Collection[str] = ()
) -> tuple[str, ...]:
    """The names of the schemas that these columns of a `file` are, of which some are `filled`:
    none, the likeliest, or several alike."""
    able = [name for name, source in SOURCES.items() if source.is_of(frozenset(columns))]
    return headers.likeliest(able, columns, file=file, filled=filled)


def steps(name: str, records: list[Record], *, file: str) -> Iterator[Step | Skipped]:
    """Every row of a table as a training step, or why it is skipped; a row with columns that its
    source has not says which source it is."""

    def made(record: Record, *, source: str) -> Step:
        step = SOURCES[name].step(record, source=source)
        foreign = [column for column in unknown(record) if column not in headers.HEADERS[name]]
        words = f"a row of {name}, as most of its columns are, though not {', '.join(foreign)[:80]}"
        return replace(step, assumed=(*step.assumed, words)) if foreign else step

    yield from each(records, file, made)


def each(records: list[Record], file: str, make: Callable[..., Made]) -> Iterator[Made | Skipped]:
    """What `make` has of every row of a table, or why it is skipped; no row ends its file."""
    for record in records:
        try:
            if record.broken or not record.fields:
                raise RowError(record.broken or OTHER_FIELDS)
            yield make(record, source=file)
        except RowError as error:
            yield Skipped(source=file, line=record.line, reason=str(error))
        except (ArithmeticError, ValueError) as error:
            yield Skipped(source=file, line=record.line, reason=f"no arithmetic can be done with "
                                                                f"its figures: {error}")


__all__ = [
    "SOURCES",
    "Found",
    "MeasurementError",
    "NcclRow",
    "Product",
    "Record",
    "Row",
    "RowError",
    "Skipped",
    "Source",
    "Step",
    "copy_of",
    "digest",
    "each",
    "files",
    "read",
    "readable",
    "rows",
    "source_of",
    "sources_of",
    "steps",
]
