"""A folder that one process at a time works in: two runs would delete and mix each other's files.

The system gives the lock back however its process ends. Where a file system has no locks, and on
Windows, it is granted to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from zsim.io.files import PlaceError

LOCK = "lock"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Context manager in which no other process is in it for this folder; PlaceError where one is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as file:
        try:
            _lock(file)
        except BlockingIOError:
            raise PlaceError(
                where=str(folder), expected="results of a single run at a time",
                found="another one that is at work there", remedy="name another folder, or wait",
            ) from None
        yield


def _lock(file: BinaryIO) -> None:
    """Lock the file until it is closed; BlockingIOError where another process has."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # Windows
        return
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # no locks on this file system
        return
