"""Output of ranks as a report shows it: alike output of several ranks once, and its last lines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from zreal.testing.judgement.roll_call import BELOW
from zreal.testing.names import named

STREAMS = ("stdout", "stderr", "log")
FRAME = re.compile(r'  File ".*", line \d+ in ')
"""A frame as faulthandler prints it, unlike a traceback's."""
MOST_LINES = 40
"""Lines that a report shows, the last ones."""
MOST_BYTES = 1 << 16


def sections(folder: Path, world_size: int) -> Iterator[tuple[str, str]]:
    """Title and text of each output of the ranks whose files are in `folder`."""
    for stream in STREAMS:
        alike: dict[tuple[int, str], list[int]] = {}
        for rank in range(world_size):
            alike.setdefault(_end(folder / f"rank_{rank}.{stream}"), []).append(rank)
        for (_, text), ranks in alike.items():
            if text:
                yield f"[{named(ranks)}] {stream}", text


def _end(file: Path) -> tuple[int, str]:
    """Size and last lines of a file; nothing where it is not there."""
    if not file.exists():
        return 0, ""
    size = file.stat().st_size
    with file.open("rb") as source:
        source.seek(max(0, size - MOST_BYTES))
        whole = source.read().decode(errors="replace").splitlines()
    lines = list(_without_callers(whole))
    last = lines[-MOST_LINES:]
    is_cut = len(last) < len(lines) or size > MOST_BYTES
    return size, "\n".join([*(["… (whole under --zero-artifacts)"] if is_cut else []), *last])


def _without_callers(lines: list[str]) -> Iterator[str]:
    """Lines without the frames that faulthandler prints of what called the body, which is last."""
    is_caller = False
    for line in lines:
        is_frame = FRAME.match(line) is not None
        is_caller = is_frame and (is_caller or any(part in line for part in BELOW))
        if not is_caller:
            yield line


def keep(folder: Path, world_size: int, *, target: Path) -> None:
    """Copy the output of all ranks to the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        for stream in STREAMS:
            file = folder / f"rank_{rank}.{stream}"
            if file.exists() and file.stat().st_size:
                shutil.copy(file, target / file.name)
