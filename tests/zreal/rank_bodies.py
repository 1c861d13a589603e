"""What ranks of the launch tests do; each takes the arguments that zreal.launch gives a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]


def fine(arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say) -> dict[str, int]:
    """Return who this is."""
    return {"rank": rank, "world_size": world_size, "given": arguments["given"]}


def killed(arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say) -> None:
    """Rank 1 is killed inside its second collective while the others wait for it."""
    progress("reduce_scatter #1 of 64 B over dp_shard")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def raising(arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say) -> None:
    """Rank 1 raises while the others wait for it."""
    progress("all_gather #7 of 128 B over dp_shard")
    if rank == 1:
        raise ValueError("a wrong shard")
    time.sleep(60)


def absent(arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say) -> None:
    """Rank 2 never arrives at the collective that the others are in."""
    progress("all_reduce #3 of 8 B over world" if rank == 2 else "all_reduce #4 of 8 B over world")
    time.sleep(60)
