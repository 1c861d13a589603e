"""Published measurements: files in many schemas, each row a training step, a collective or a product, with what was measured of it.

Each schema is a file here that says how a row maps to a scenario, and a line in the table below. The schema is told by the columns, so
folders and files may be called anything, and rows that nobody has seen of a known schema can be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zsim.measurements import fms_fsdp, llm_foundry, megatron, nanotron, nccl_files, products, torchtitan
from zsim.measurements.nccl_rows import NcclRow
from zsim.measurements.products import Product
from zsim.measurements.table import MeasurementError, Record, RowError, Skipped, Step, content, read, table_of

MAX_FILES = 1000
Row = Step | NcclRow | Product
Made = TypeVar("Made", Step, Product)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A schema of training steps: the columns that tell it, and what makes a step of a record."""

    columns: frozenset[str]
    step: Callable[..., Step]


SOURCES: dict[str, Source] = {
    "llm-foundry": Source(columns=llm_foundry.COLUMNS, step=llm_foundry.step),
    "torchtitan": Source(columns=torchtitan.COLUMNS, step=torchtitan.step),
    "fms-fsdp": Source(columns=fms_fsdp.COLUMNS, step=fms_fsdp.step),
    "nanotron": Source(columns=nanotron.COLUMNS, step=nanotron.step),
    "megatron-deepspeed": Source(columns=megatron.COLUMNS, step=megatron.step),
}


def files(folder: Path) -> list[Path]:
    """The CSV files of a folder, or the one file given; MeasurementError where there are none."""
    if folder.is_file():
        return [folder]
    found = sorted(path for path in folder.glob("*.csv") if path.is_file()) if folder.is_dir() else []
    if not found:
        raise MeasurementError(
            where=str(folder), expected="a folder with CSV files of measurements", found="none"
        )
    return found[:MAX_FILES]


def rows(path: Path) -> list[Row | Skipped]:
    """Every row of a file as what was measured, or why it is skipped; MeasurementError for a file that is no table and no nccl-tests.

    A file whose columns nobody knows is one row that is skipped.
    """
    data = content(path)
    text = data.decode("utf-8-sig", errors="replace")
    if nccl_files.is_csv(text) or _is_nccl_tests(text):
        return _collectives(text, path.name)
    columns, records = table_of(data, where=str(path))
    name = source_of(columns)
    if name:
        return list(steps(name, records, file=path.name))
    if products.COLUMNS.issubset(columns):
        return list(_each(records, path.name, products.product))
    return [Skipped(source=path.name, line=1, reason=f"columns of no known source: {', '.join(columns)[:200]}")]


def _is_nccl_tests(text: str) -> bool:
    """nccl-tests' own output: a JSON object, or text with its comments, perhaps behind a launcher's words."""
    start = text.lstrip()[:65536]
    return start.startswith("{") or re.search(r"^#\s+(nThread|Using devices|Collective test|nccl-tests)", start, re.MULTILINE) is not None


def _collectives(text: str, name: str) -> list[Row | Skipped]:
    found = nccl_files.read_any(text, source=name)
    skipped = [
        Skipped(source=name, line=one.line, reason=f"{one.reason} ({one.count} rows)" if one.count > 1 else one.reason)
        for one in found.skipped
    ]
    return [*found.rows, *skipped]


def source_of(columns: tuple[str, ...]) -> str:
    """The name of the schema that these columns are, "" for none."""
    return next((name for name, source in SOURCES.items() if source.columns <= set(columns)), "")


def steps(name: str, records: list[Record], *, file: str) -> Iterator[Step | Skipped]:
    """Every row of a table as a training step, or why it is skipped."""
    yield from _each(records, file, SOURCES[name].step)


def _each(records: list[Record], file: str, make: Callable[..., Made]) -> Iterator[Made | Skipped]:
    for record in records:
        try:
            if not record.fields:
                raise RowError("more fields than the table has columns")
            yield make(record, source=file)
        except RowError as error:
            yield Skipped(source=file, line=record.line, reason=str(error))


__all__ = [
    "SOURCES",
    "MeasurementError",
    "NcclRow",
    "Product",
    "Record",
    "Row",
    "RowError",
    "Skipped",
    "Source",
    "Step",
    "files",
    "read",
    "rows",
    "source_of",
    "steps",
]
