"""Folders of ranks for files that are opened by name, as of drives: gone with the process, however
it ends."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir, mkdtemp

_PREFIX = "zsim-drive-{}-"


def make_folder() -> Path:
    """A new folder of this process."""
    return Path(mkdtemp(prefix=_PREFIX.format(os.getpid())))


def remove_folders(pid: int) -> None:
    """Remove all folders of a process."""
    for folder in Path(gettempdir()).glob(_PREFIX.format(pid) + "*/"):
        rmtree(folder, ignore_errors=True)
