"""Processes that a process has started, and those that they have started, as Linux lists them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zreal.testbed.namespaces import LIBC

PR_SET_CHILD_SUBREAPER = 36
"""prctl option of Linux's <sys/prctl.h>: this process becomes the parent of orphans below it."""


class ProcessState(NamedTuple):
    """A process: `pid` and `began`, in ticks since the system's start, are no other's."""

    pid: int
    began: int
    parent: int
    session: int


def adopt_orphans() -> None:
    """Stay the ancestor of all that this process starts, also where what is between has ended."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def running() -> Iterator[ProcessState]:
    """Every process that runs; () where there is no /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if text[0] not in "ZX":
                yield ProcessState(int(folder.name), int(text[19]), int(text[1]), int(text[3]))


def descendants(pids: Collection[int]) -> list[ProcessState]:
    """The processes below `pids`, without these."""
    children: dict[int, list[ProcessState]] = {}
    for process in running():
        children.setdefault(process.parent, []).append(process)
    below: list[ProcessState] = []
    ahead = [*pids]
    while ahead:
        own = children.pop(ahead.pop(), [])
        below += own
        ahead += [process.pid for process in own]
    return below


def command_of(pid: int) -> str:
    """The command of a process, with its arguments; "" where it has ended, or is not shown."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return text.replace("\0", " ").strip()
    return ""
