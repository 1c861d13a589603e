"""Places of results that a command is to write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zsim.cli import terminal
from zsim.io import files


def require(path: Path, *, option: str, apart_from: Iterable[Path] = (), kind: str = "") -> None:
    """Check a place before the work as `files.require` does, and tell of a folder that is made."""
    files.require(path, option=option, apart_from=apart_from, kind=kind)
    if not path.parent.exists():
        terminal.note(f"{option}: makes the folder {path.parent}, which is not there")
