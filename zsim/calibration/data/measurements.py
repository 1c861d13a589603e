"""Files of measurements: tables of this project, nccl-tests' output, saved Runs.

README.md describes the table's columns. A file is told by its content and not by its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from zsim.calibration import collectives
from zsim.calibration.data import saved_runs, table
from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.logs import read_log
from zsim.calibration.records import (
    MISSING,
    Collective,
    MeasurementError,
    Skipped,
    Step,
    content,
    decoded,
)
from zsim.errors import listed
from zsim.io.files import obstacle

MAX_FILES = 1000
SUFFIXES = (".csv", ".txt", ".log", ".out", ".json")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder that may hold measurements, each with its name below the folder, and
    those that are not read."""

    files: tuple[tuple[Path, str], ...]
    skipped: tuple[Skipped, ...]


def files(folder: Path) -> Listing:
    """The files below a folder with one of `SUFFIXES`, or the one file given.

    MeasurementError where there are none. Names that begin with a dot are passed by.
    """
    expected = "a folder with tables of measurements, or logs of nccl-tests"
    if folder.is_file():
        return Listing(((folder, folder.name),), ())
    if not folder.exists():
        raise MeasurementError(
            where=str(folder), expected=f"{expected}, or one such file", found=MISSING
        )
    paths: list[tuple[Path, str]] = []
    skipped: list[Skipped] = []
    for path in _below(folder):
        name = path.relative_to(folder).as_posix()
        reason = _no_plain_file(path)
        if not reason and path.suffix.lower() not in SUFFIXES:
            reason = f"not a measurement file: its name does not end in {listed(SUFFIXES)}"
        elif not reason and len(paths) >= MAX_FILES:
            reason = f"more than {MAX_FILES:,} files in the folder"
        if reason:
            skipped.append(Skipped(source=name, line=1, reason=reason))
        else:
            paths.append((path, name))
    if not paths:
        count = f"none among {len(skipped)} files" if skipped else "none"
        raise MeasurementError(where=str(folder), expected=expected, found=count)
    return Listing(tuple(paths), tuple(skipped))


def _below(folder: Path) -> Iterator[Path]:
    """Files below a folder in order, links to folders, and folders that cannot be listed."""
    closed: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        yield from (Path(parent) / name for name in folders if (Path(parent) / name).is_symlink())
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith("."))
    yield from (Path(error.filename) for error in closed)


def _no_plain_file(path: Path) -> str:
    """The reason why `path` is not opened, as it leads elsewhere or has no end; "" for none."""
    if path.is_dir():
        return (
            "a link to a folder, not followed: give that one by itself"
            if path.is_symlink()
            else "a folder that cannot be listed"
        )
    if not path.exists():
        return "a link to a file that is not here"
    return obstacle(path)


def rows(
    path: Path, *, name: str = "", collective: str = "", cluster: str = "",
    scenarios: Path | None = None,
) -> list[Step | Collective | Skipped]:
    """Every row of a file, or the reason why it is skipped.

    `collective` and `cluster` are those of a log of nccl-tests that does not name them, and the
    scenario of a saved Run is below `scenarios`. MeasurementError for a file that cannot be read,
    TableError for a table with problems.
    """
    name, data = name or path.name, content(path)
    if saved_runs.is_run(data):
        return [saved_runs.step(path, name=name, scenarios=scenarios)]
    text = decoded(data, errors="replace")
    if table.is_table(data):
        return [*table.parse(data, where=name, folder=path.parent)]
    if log := read_log(text, source=name, collective=collective):
        return [
            collectives.of_log(row, cluster=cluster) if isinstance(row, LogRow) else _counted(row)
            for row in log
        ]
    reason = "no measurements: a table has columns that begin with measured., and a log " \
             "nccl-tests' own lines" if text.strip() else "an empty file"
    return [Skipped(source=name, line=1, reason=reason)]


def _counted(row: Skipped) -> Skipped:
    """The row with how many others are skipped with it in its reason."""
    return replace(row, reason=f"{row.reason} ({row.count} rows)") if row.count > 1 else row


def digest(path: Path) -> bytes:
    """A hash that files with the same bytes have in common; MeasurementError as `content`."""
    return sha256(content(path)).digest()


def copy_of(first: str, *, name: str) -> Skipped:
    """The reason why a file is skipped that holds the same as the one called `first`."""
    return Skipped(source=name, line=1, reason=f"holds the same as {first}: counted once")
