"""Starts ranks as processes, supervises them, and leaves none behind.

Ranks are forked from a server that has loaded torch, so a launch takes a tenth of a second. The
controller holds the rendezvous store and one pipe per rank, and waits for every rank's exit. When a
rank dies, raises or hangs, the controller reports it and ends the others. A rank ends itself when
its controller is gone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from zreal.processes.fork_server import (
    CLOSING_S,
    REASONS,
    server_end,
    server_pid,
    watched_server,
    without_main,
)
from zreal.processes.progress import Progress
from zreal.processes.rank_folder import remove_folders
from zreal.processes.rank_process import rank_main
from zreal.processes.rank_status import RankStatus
from zreal.processes.reports.failure_report import launch_error, not_started, server_ended
from zsim.io.system.signals import undisturbed
from zsim.runs.launch.planned_collectives import Planned

PRELOAD = ["zreal.rank.preloaded"]
POLL_S = 0.25
"""Seconds between two looks at the progress of ranks."""
Look = Callable[[list[RankStatus]], None]
GRACE_S = 0.5
"""Seconds in which other ranks may still report after the first one failed."""


def launch(
    target: str,
    arguments: dict[str, Any],
    *,
    world_size: int,
    timeout_s: float = 120.0,
    hosts: Sequence[Sequence[int]] = (),
    program: Planned | None = None,
    kept: dict[int, Any] | None = None,
    look: Look = lambda _: None,
) -> list[Any]:
    """Run `target` ("module:function") on every rank and return what each returned, by rank.

    The function receives `arguments`, `rank`, `world_size`, `port` (of the store at 127.0.0.1),
    `progress` and `keep`. It calls `progress` before it enters a collective, and `keep` with each
    part of its result that must survive a failure. Parts and results must be JSON.

    `hosts`: by rank, the testbed's host that it runs in (Network.places of zreal.testbed).
    `program`: the collective that a rank should issue as a number, for reports.
    `kept`: gets the last part of each rank's result, also where the controller is interrupted.
    `look`: called with all ranks whenever one has reported, and every 0.25 s.

    LaunchError when any rank fails, or when not all are done after `timeout_s` seconds.
    """
    with started(target, arguments, world_size=world_size, hosts=hosts) as ranks:
        try:
            _supervise(
                ranks, deadline=time.monotonic() + timeout_s, timeout_s=timeout_s, program=program,
                look=look,
            )
        finally:
            with undisturbed():
                for rank in ranks:
                    rank.receive()
                if kept is not None:
                    kept |= {rank.rank: rank.result for rank in ranks if rank.result is not None}
        return [rank.result for rank in ranks]


@contextmanager
def started(
    target: str, arguments: dict[str, Any], *, world_size: int, hosts: Sequence[Sequence[int]] = (),
    preload: Sequence[str] = (), commanded: bool = False,
) -> Iterator[list[RankStatus]]:
    """Context manager of started ranks that run `target` (see `launch`); at its end none is left.

    `preload`: modules that the fork server imports, if it is not there yet, for all of its ranks.
    `commanded`: the function also receives `commands`, by which it reads what RankStatus.command
    sends, and answers.
    """
    from zreal.processes.rendezvous import store_for_ranks

    try:
        store = store_for_ranks()
    except (OSError, RuntimeError) as error:
        raise not_started(error) from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share this machine's cores
    ranks: list[RankStatus] = []
    all_started = threading.Event()
    with watched_server(all_started):
        try:
            for rank in range(world_size):
                begun = _start(
                    context, target, json.dumps(arguments), rank=rank, world_size=world_size,
                    port=store.port, host=hosts[rank] if hosts else (), commanded=commanded,
                )
                _add(begun, ranks, world_size)
            all_started.set()
            yield ranks
        except (OSError, EOFError) as error:
            is_closed = isinstance(error, EOFError | ConnectionError)
            if end := server_end(patience_s=CLOSING_S if is_closed else 0.0):
                when = f"before rank {len(ranks)} of {world_size} was started"
                raise server_ended(end, ranks, when) from error
            raise not_started(error) from error
        finally:
            with undisturbed():
                _end(ranks)
            del store


def _start(
    context: Any, target: str, arguments: str, *, rank: int, world_size: int, port: int,
    host: Sequence[int], commanded: bool,
) -> RankStatus:
    receiver, sender = context.Pipe(duplex=False)
    commands = context.Pipe(duplex=False) if commanded else (None, None)
    progress = Progress(context)
    process = context.Process(
        target=rank_main, name=f"rank {rank}",
        args=(target, arguments, rank, world_size, port, sender, progress, host, commands[0]),
    )
    with without_main():
        process.start()
    for end in (sender, commands[0]):
        if end is not None:
            end.close()
    os.set_blocking(receiver.fileno(), False)
    return RankStatus(
        rank=rank, process=process, pipe=receiver, progress=progress, server=server_pid(),
        commands=commands[1],
    )


def _add(started: RankStatus, ranks: list[RankStatus], world_size: int) -> None:
    """Add a started rank; LaunchError where Python has silently started another server for it."""
    ranks.append(started)
    if started.server != ranks[0].server:
        when = f"before rank {started.rank} of {world_size} was started"
        end = REASONS.get(ranks[0].server or 0, "a server that ended")
        raise server_ended(end, ranks, when)


def _supervise(
    ranks: list[RankStatus], *, deadline: float, timeout_s: float, program: Planned | None = None,
    look: Look = lambda _: None,
) -> None:
    """Wait until every rank is done; LaunchError shortly after one fails, or at the deadline."""
    attend(ranks, deadline=deadline, look=look)
    if not all(rank.done for rank in ranks):
        raise launch_error(ranks, timeout_s, program)


def attend(
    ranks: list[RankStatus], *, deadline: float, look: Look = lambda _: None, ending: bool = True
) -> None:
    """Wait until every rank is done, or until shortly after the first one fails, or the deadline.

    `ending`: a rank that is done, or that has failed, ends next.
    """
    waiting = list(ranks)
    failed_at = 0.0
    while waiting:
        now = time.monotonic()
        limit = min(deadline, failed_at + GRACE_S) if failed_at else deadline
        if now >= limit:
            break
        wait(
            [rank.process.sentinel for rank in waiting] + [rank.pipe for rank in waiting],
            timeout=min(POLL_S, limit - now),
        )
        for rank in list(waiting):
            rank.note_progress()
            rank.receive()
            if rank.done or rank.error or rank.process.exitcode is not None:
                rank.process.join(0.5 if ending and (rank.done or rank.error) else 0)
                rank.receive()
                rank.ended_at = time.monotonic()
                waiting.remove(rank)
                failed_at = failed_at or (0.0 if rank.done else rank.ended_at)
        look(ranks)


def _end(ranks: list[RankStatus]) -> None:
    """Ask every rank to stop, then kill it, then reap it, the processes that it started, and its
    folders."""
    for stop in ("terminate", "kill"):
        alive = [rank.process for rank in ranks if rank.process.is_alive()]
        for process in alive:
            getattr(process, stop)()
        limit = time.monotonic() + 1.0
        for process in alive:
            process.join(max(0.0, limit - time.monotonic()))
    for rank in ranks:
        rank.process.join()
        with suppress(ProcessLookupError, PermissionError):
            # the rank leads a session of the processes that it started
            os.killpg(rank.process.pid, signal.SIGKILL)
        remove_folders(rank.process.pid)
        rank.process.close()
        rank.pipe.close()
        if rank.commands is not None:
            rank.commands.close()
