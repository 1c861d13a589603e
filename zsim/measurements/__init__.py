"""Published measurements as scenarios: one file per source, found by its columns, so that any rows of a known schema can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zsim.measurements import fms_fsdp, llm_foundry, megatron, nanotron, torchtitan
from zsim.measurements.table import MeasurementError, Record, RowError, Skipped, Step, read

MAX_FILES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A schema of training steps: the columns that tell it, and what makes a step of one row."""

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


def source_of(columns: tuple[str, ...]) -> str:
    """The name of the schema that these columns are, "" for none."""
    return next((name for name, source in SOURCES.items() if source.columns <= set(columns)), "")


def steps(name: str, records: list[Record], *, file: str) -> Iterator[Step | Skipped]:
    """Every row of a table as a step, or why it is skipped."""
    for record in records:
        try:
            if not record.fields:
                raise RowError("more fields than the table has columns")
            yield SOURCES[name].step(record, source=file)
        except RowError as error:
            yield Skipped(source=file, line=record.line, reason=str(error))


__all__ = [
    "SOURCES",
    "MeasurementError",
    "Record",
    "RowError",
    "Skipped",
    "Source",
    "Step",
    "files",
    "read",
    "source_of",
    "steps",
]
