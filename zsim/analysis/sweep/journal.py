"""Journal of a sweep: a line of JSON for each row that is done, beside the table.

With it an interrupted sweep goes on where it stopped, and a longer one computes what is new alone.
A row is told by the digits of its point, which change with what it says and with zsim's version. A
line that was cut in the middle, or that is none of a journal, is done again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from zsim.analysis.sweep.point import FIGURES, Row
from zsim.io import files, json_reader

KEYS = {"status", "reason", *FIGURES}


class Journal:
    """The rows done so far, by key; each new one is written at once. None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._rows: dict[str, Row] = {}

    def __enter__(self) -> Journal:
        if self.path is not None:
            files.require(self.path, option="-o")
            try:
                self._rows = _read(self.path)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
            except OSError as error:
                raise files.unwritten(self.path, error, nbytes=0) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def done(self, keys: Collection[str]) -> dict[str, Row]:
        """The rows of those among `keys` that are done."""
        return {key: self._rows[key] for key in keys if key in self._rows}

    def add(self, key: str, row: Row) -> None:
        """Write `row` down; PlaceError where there is no room for it."""
        if self._file is None or self.path is None:
            return
        line = json.dumps({"key": key, "row": row}, allow_nan=False).encode()
        try:
            self._file.write(b"\n" + line)  # the line before may have been cut
        except OSError as error:
            raise files.unwritten(self.path, error, nbytes=len(line)) from None


def _read(path: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                rows |= _row(line)
    return rows


def _row(line: str) -> dict[str, Row]:
    try:
        entry: Any = json_reader.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(entry, dict) or set(entry) != {"key", "row"}:
        return {}
    key, row = entry["key"], entry["row"]
    fits = isinstance(key, str) and isinstance(row, dict) and set(row) == KEYS
    return {key: row} if fits and row["status"] in ("ok", "refused") else {}
