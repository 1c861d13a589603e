"""Where results go: a file that can be written, asked before a long run and not after it, and none of those that are being read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zsim.errors import ZsimError

FILE = "a file that can be written"


class PlaceError(ZsimError):
    """A place that cannot be written, or must not be."""


def require(path: Path, *, option: str = "", apart_from: Iterable[Path] = ()) -> None:
    """PlaceError when `path` could not be written, or is one of the files `apart_from`, there or to come; `option` asked for it."""
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    inside = parent if parent != path else parent.parent
    odd = "a folder" if path.is_dir() else "a pipe, which may never be read" if path.is_fifo() else ""
    if odd or not inside.is_dir() or not os.access(parent, os.W_OK):
        found = odd or (f"{parent} closed to writing" if inside.is_dir() else f"{inside}, which is a file")
        raise PlaceError(where=str(path), expected=FILE, found=found)
    for file in apart_from:
        same = path.samefile(file) if path.exists() and file.exists() else path.resolve() == file.resolve()
        if same:
            found = f"{path}, which this command reads or writes as well"
            raise PlaceError(where=option or str(path), expected="a file of its own", found=found)


def write(path: Path, data: bytes | str) -> None:
    """`data` as the file `path`, text as UTF-8, in a folder that is made when there is none; PlaceError when it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise PlaceError(where=str(path), expected=FILE, found=str(error.strerror)) from None
