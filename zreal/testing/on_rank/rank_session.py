"""The process of a rank under test: its output, environment and process group.

It then runs a session of pytest for one test or one file, or calls functions.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zreal.processes.descendants import descendants
from zreal.processes.rank_device import start_group, take_device, tell_hosts_apart
from zreal.processes.rank_process import Commands
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zreal.testing.on_rank.bodies import Served, call_function, function_error
from zreal.testing.on_rank.collective_checks import CollectiveChecks
from zreal.testing.on_rank.rank import Rank
from zreal.testing.on_rank.rank_plugin import run_session

STREAMS = ("stdout", "stderr")
UNLIMITED = timedelta(days=365)
"""Time that a rank waits for another. It is the controller that ends ranks in time, and tells why.
"""


def serve(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Callable[[Any], None], commands: Commands,
) -> object:
    """Run one rank until the controller commands its end; returns what its last answer is.

    `arguments` are those of `zreal.testing.ranks.Ranks`.
    """
    folder = Path(arguments["folder"])
    _redirect_output(folder, rank)
    _enter_environment(arguments, rank, world_size)
    gc.freeze()  # of torch's million objects none is garbage; pytest collects after each test
    settle()
    dist.set_debug_level_from_env()
    if arguments["backend"] == "nccl":
        tell_hosts_apart(rank)
    device = take_device("cuda" if arguments["backend"] == "nccl" else "cpu", local_rank=rank)
    stores = [rendezvous(rank=rank, world_size=world_size, port=port) for _ in range(2)]
    for store in stores:
        store.set_timeout(UNLIMITED)
    checks = CollectiveChecks(stores[0], rank=rank, world_size=world_size, progress=progress)
    start_group(
        arguments["backend"], store=dist.PrefixStore("c10d", stores[1]), rank=rank,
        world_size=world_size, device=device, timeout=UNLIMITED,
    )
    this = Rank(
        index=rank, world_size=world_size, device=device, backend=arguments["backend"],
        _folder=folder, _store=stores[0], _checks=checks,
    )
    served = Served(rank=this, checks=checks, commands=commands, folder=folder)
    with checks.active():
        if arguments["session"] is not None:
            end = run_session(arguments["session"], served)
        else:
            end = {"outcome": "passed"}
            served.answer(end)
            served.answer_calls(partial(call_function, this), function_error)
    below = [[process.pid, process.began] for process in descendants([os.getpid()])]
    return end | checks.told() | {"left": below}


def _redirect_output(folder: Path, rank: int) -> None:
    """Let everything that this process prints, from C++ too, go to files of its own."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in enumerate(STREAMS, 1):
        path = folder / f"rank_{rank}.{name}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        stream = open(  # noqa: SIM115 - until the process ends
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)


def _enter_environment(arguments: dict[str, Any], rank: int, world_size: int) -> None:
    """Environment, folder and path for imports of the controller, as they are now.

    The fork server has those of the time at which it was started. A rank also has the variables of
    torchrun's, but no address: its process group is there.
    """
    os.environ.clear()
    os.environ |= arguments["environment"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.chdir(arguments["cwd"])
    sys.path[:] = arguments["path"]
