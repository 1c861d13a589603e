"""Folders of ranks for files that are opened by name, as of drives, and the room for files.

A folder goes with its process, by whoever watches that. One whose watcher was killed too goes as
the next is made. A process has its folders locked; the system unlocks those of one that is gone, in
whatever container it was.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage, rmtree
from tempfile import gettempdir, mkdtemp

from zsim.errors import BackendUnavailableError
from zsim.io.units import format_bytes

_PREFIX = "zsim-drive-{}-"
_locks: dict[Path, int] = {}
"""Open folders of this process."""


def require_room(nbytes: int) -> None:
    """BackendUnavailableError where the folder for temporary files has no room for so much."""
    folder = gettempdir()
    if nbytes > (free := disk_usage(folder).free):
        raise BackendUnavailableError(
            where="offload.optimizer", expected=f"{format_bytes(nbytes)} more in {folder}",
            found=f"{format_bytes(free)} free", remedy="let TMPDIR name a folder with room",
        )


def make_folder() -> Path:
    """A new folder of this process; those of processes that are gone are removed."""
    for left in Path(gettempdir()).glob(_PREFIX.format("*") + "*/"):
        with suppress(OSError):  # of others, or locked
            os.close(_locked(left))
            rmtree(left)
    made = Path(mkdtemp(prefix="zsim-new-"))
    lock = _locked(made)
    made = made.rename(made.with_name(_PREFIX.format(os.getpid()) + made.name))
    _locks[made] = lock
    return made


def remove_folders(pid: int) -> None:
    """Remove all folders of a process."""
    for folder in Path(gettempdir()).glob(_PREFIX.format(pid) + "*/"):
        rmtree(folder, ignore_errors=True)
        if folder in _locks:
            os.close(_locks.pop(folder))


def _locked(folder: Path) -> int:
    """The folder, open and locked; OSError where another process has it locked."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened
