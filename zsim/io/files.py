"""Files of results: checked for writing before a long run, and never one of the files that are
being read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from zsim.errors import ZsimError

FILE = "a file that can be written"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, of a user's quota, and of the limit on a file's size."""


class PlaceError(ZsimError):
    """An output file that cannot be written, or must not be."""


BEGINNINGS: Mapping[str, tuple[bytes, ...]] = {
    "a Run": (b'{\n "run": ', b'{\n "schema_version": '),
    "a trace": (b'{"traceEvents"', b"\x1f\x8b"),
    "a snapshot": (b"\x80",),
    "a picture": (b"<svg ",),
    "a report": (b"<?xml",),
    "a page": (b"<!doctype html>",),
    "a cluster's file": (b"# calibrated on ", b"\ndescription = "),
}
"""First bytes of the files that a result may replace, by kind of result."""


def require(
    path: Path, *, option: str = "", apart_from: Iterable[Path] = (), kind: str = ""
) -> None:
    """PlaceError when a result cannot be written to `path`, or `path` is one of the files
    `apart_from`, there or to come. Messages name the `option` that asked for the file.

    A file that is there already is replaced only by a result of its own `kind`.
    """
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    inside = parent if parent != path else parent.parent
    odd = (
        "a folder" if path.is_dir() else "a pipe, which may never be read" if path.is_fifo() else ""
    )
    if odd or not inside.is_dir() or not os.access(parent, os.W_OK):
        obstacle = odd or (
            f"{parent} closed to writing" if inside.is_dir() else f"{inside}, which is a file"
        )
        raise PlaceError(
            where=str(path), expected=FILE, found=obstacle, remedy="name another"
        )
    for file in apart_from:
        same = (
            path.samefile(file)
            if path.exists() and file.exists()
            else path.resolve() == file.resolve()
        )
        if same:
            raise PlaceError(
                where=option or str(path), expected="a file of its own",
                found=f"{path}, which this command reads or writes as well",
            )
    if (
        kind
        and path.is_file()
        and not _begins(path).startswith(BEGINNINGS[kind])
        and path.stat().st_size
    ):
        raise PlaceError(
            where=option or str(path), expected=f"a new file, or {kind} to replace",
            found=f"{path}, which holds something else", remedy="name another",
        )


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise PlaceError(where=str(path), expected=FILE, found=str(error.strerror)) from None


def write(path: Path, data: bytes | str) -> None:
    """Write `data` to the file `path`, text as UTF-8, in a folder that is made when there is none.
    PlaceError when it cannot be written.

    An earlier file stays whole until the new one is complete.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # as /dev/null
            path.write_bytes(content)
            return
        target = path.resolve()
        part = target.with_name(f"{target.name[:200]}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise unwritten(path, error, nbytes=len(content)) from None


def unwritten(path: Path, error: OSError, *, nbytes: int) -> PlaceError:
    """The error of `nbytes` that could not be written to `path`."""
    if error.errno in FULL:
        return _full(path, error, nbytes=nbytes)
    return PlaceError(where=str(path), expected=FILE, found=str(error.strerror))


def free_nbytes(folder: Path) -> int | None:
    """Bytes that a user may still write on the disk of `folder`; None where that is not known."""
    try:
        system = os.statvfs(folder)
    except (OSError, AttributeError):  # Windows has no such call
        return None
    return system.f_bavail * system.f_frsize


def _full(path: Path, error: OSError, *, nbytes: int) -> PlaceError:
    """The error of a disk, a quota or a limit with no room for a file of `nbytes`."""
    free = free_nbytes(path.parent)
    return PlaceError(
        where=str(path), expected=f"room for {nbytes:,} B",
        found=str(error.strerror) + ("" if free is None else f", {free:,} B free"),
        remedy="make room, or name another disk",
    )


def obstacle(path: Path, error: OSError | None = None) -> str:
    """The reason for which `path` cannot be read: of its kind, or of `error`; "" for none."""
    if os.path.isdir(path):
        return "a folder"
    if error and error.strerror and not isinstance(error, FileNotFoundError):
        return error.strerror
    if not os.path.exists(path):
        return "no such file"
    return "" if os.path.isfile(path) else "a pipe or a device"  # which may never end


def not_a_file(path: Path) -> str:
    """The complaint about `path`, no regular file."""
    text = obstacle(path)
    return text if text == "no such file" else f"expected a file, found {text}"
