"""Output of ranks as a report shows it: alike output of several ranks once, and its last lines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from zreal.testing.names import named

STREAMS = ("stdout", "stderr", "log")
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
        lines = source.read().decode(errors="replace").splitlines()
    last = lines[-MOST_LINES:]
    is_cut = len(last) < len(lines) or size > MOST_BYTES
    return size, "\n".join([*(["… (whole under --zero-artifacts)"] if is_cut else []), *last])


def keep(folder: Path, world_size: int, *, target: Path) -> None:
    """Copy the output of all ranks to the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        for stream in STREAMS:
            file = folder / f"rank_{rank}.{stream}"
            if file.exists() and file.stat().st_size:
                shutil.copy(file, target / file.name)
