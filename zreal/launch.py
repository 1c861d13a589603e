"""Starts ranks as processes, watches every one of them, and leaves none behind.

Ranks are forked from a server that has torch loaded already, so a launch costs a tenth of a second. The controller holds
the rendezvous store and one pipe per rank; it waits on every rank's exit, names the first that died, raised or hung
together with its last collective, and ends the others. A rank ends itself when its controller is gone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from zsim.errors import RankError

PRELOAD = ["torch", "torch.distributed", "torch.distributed.fsdp", "zreal.worker"]
PROGRESS_BYTES = 200
READ_BYTES = 1 << 20
UNTOLD = 255
"""What Python gives as the exit code of a process whose fork server cannot tell any more how it ended."""
PR_SET_PDEATHSIG = 1
"""Of Linux's <sys/prctl.h>: the signal that a process gets when its parent ends."""
REFERENCE = "the single-process reference"
"""What a rank says that is past its last collective and trains by itself what its parameters are compared with."""
RECENT_S = 3.0
"""A rank that has entered another collective within so many seconds of the timeout is slow and does not hang."""
POLL_S = 0.25
"""How often it is looked whether ranks get on."""
CLOSING_S = 1.0
"""How long a process whose connections are closed may take to end."""
GRACE_S = 0.5
"""How long siblings may still report after the first rank failed."""


@dataclass(slots=True)
class _Rank:
    """One rank as the controller sees it."""

    rank: int
    process: Any
    pipe: Connection
    progress: Any
    unread: bytearray = field(default_factory=bytearray)
    """The beginning of a message whose end has not come yet."""
    result: Any = None
    error: str = ""
    ended_at: float = 0.0
    done: bool = False
    moves: int = 0
    """How often it was seen at another collective than before."""
    moved_at: float = 0.0
    _seen: str = ""

    @property
    def last(self) -> str:
        """The last collective that the rank said it was entering."""
        text = bytes(self.progress).split(b"\0", 1)[0].decode(errors="replace")
        return text or "no collective yet"

    def look(self) -> None:
        """Note whether the rank has entered another collective since the last look."""
        last = self.last
        if last != self._seen:
            self._seen, self.moves, self.moved_at = last, self.moves + 1, time.monotonic()

    @property
    def gets_on(self) -> bool:
        """Whether it went from one collective to another a moment ago; who has only begun says nothing yet."""
        return self.moves > 2 and time.monotonic() - self.moved_at < RECENT_S

    def receive(self) -> None:
        """Take what the rank has sent: parts of its result, and at last the result or the error.

        A message ends with a line; one that has come in part is kept and never waited for, since its rank may have
        stopped in the middle of it.
        """
        with suppress(BlockingIOError):
            while data := os.read(self.pipe.fileno(), READ_BYTES):
                self.unread += data
                if b"\n" in data:
                    *messages, self.unread = self.unread.split(b"\n")
                    for message in messages:
                        self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        self.result = message.get("result", message.get("part", self.result))
        self.done, self.error = "result" in message, message.get("error", "")


class LaunchError(RankError):
    """A rank that failed; `results` holds what each rank had reported by then, by rank: its result or the last part of it."""

    def __init__(self, *, where: str, expected: str, found: str, remedy: str = "", results: dict[int, Any]) -> None:
        super().__init__(where=where, expected=expected, found=found, remedy=remedy)
        self.results = results


def launch(
    target: str,
    arguments: dict[str, Any],
    *,
    world_size: int,
    timeout_s: float = 120.0,
) -> list[Any]:
    """Run `target` ("module:function") on every rank and return what each returned, by rank.

    The function is called with `arguments`, `rank`, `world_size`, `port` (of the store at 127.0.0.1), `progress`, to say
    which collective it enters, and `keep`, to hand over what is to survive its failure. What it keeps and returns must be
    JSON. LaunchError when any rank fails, or when not all are done after `timeout_s` seconds.
    """
    import torch.distributed as dist

    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise _not_started(error) from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share this machine's cores
    ranks: list[_Rank] = []
    server: int | None = None
    try:
        for rank in range(world_size):
            started = _start(context, target, json.dumps(arguments), rank=rank, world_size=world_size, port=store.port)
            ranks.append(started)
            if ranks[1:] and server != _server_pid():  # Python has started another one without a word
                raise _server_ended("it ended", ranks, f"before rank {rank} of {world_size} was started")
            server = _server_pid()
        _supervise(ranks, deadline=time.monotonic() + timeout_s, timeout_s=timeout_s)
    except (OSError, EOFError) as error:
        if end := _server_end(patience_s=CLOSING_S if isinstance(error, EOFError | ConnectionError) else 0.0):
            raise _server_ended(end, ranks, f"before rank {len(ranks)} of {world_size} was started") from error
        raise _not_started(error) from error
    finally:
        with _undisturbed():
            _end(ranks)
        del store
    return [rank.result for rank in ranks]


def _not_started(error: Exception) -> LaunchError:
    """This machine refuses a process, a pipe or a socket: too many are open, or the path of temporary files is too long."""
    return LaunchError(
        where="launch",
        expected="processes, pipes and sockets for every rank",
        found=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
        remedy="look at `ulimit -n`, at TMPDIR (sockets take short paths only) and at free memory",
        results={},
    )


def _start(context: Any, target: str, arguments: str, *, rank: int, world_size: int, port: int) -> _Rank:
    receiver, sender = context.Pipe(duplex=False)
    progress = context.RawArray(ctypes.c_char, PROGRESS_BYTES)
    process = context.Process(
        target=_rank_main, args=(target, arguments, rank, world_size, port, sender, progress), name=f"rank {rank}"
    )
    process.start()
    sender.close()
    os.set_blocking(receiver.fileno(), False)
    return _Rank(rank=rank, process=process, pipe=receiver, progress=progress)


def _supervise(ranks: list[_Rank], *, deadline: float, timeout_s: float) -> None:
    waiting = list(ranks)
    failed_at = 0.0
    while waiting:
        now = time.monotonic()
        limit = min(deadline, failed_at + GRACE_S) if failed_at else deadline
        if now >= limit:
            break
        wait([rank.process.sentinel for rank in waiting] + [rank.pipe for rank in waiting], timeout=min(POLL_S, limit - now))
        for rank in list(waiting):
            rank.look()
            rank.receive()
            if rank.done or rank.error or rank.process.exitcode is not None:
                rank.process.join(0.5 if rank.done or rank.error else 0)
                rank.receive()
                rank.ended_at = time.monotonic()
                waiting.remove(rank)
                failed_at = failed_at or (0.0 if rank.done else rank.ended_at)
    bad = [rank for rank in ranks if not rank.done]
    if bad:
        raise _verdict(ranks, bad, timeout_s)


def _verdict(ranks: list[_Rank], bad: list[_Rank], timeout_s: float) -> LaunchError:
    """The first to die of its own is the headline; a lost connection to it is a consequence."""
    died = [rank for rank in bad if rank.ended_at and not rank.error]
    raised = [rank for rank in bad if rank.error and not _is_consequence(rank.error)]
    results = {rank.rank: rank.result for rank in ranks if rank.result is not None}
    roots = [*died, *raised] or [rank for rank in bad if rank.error]
    if died and not raised and all(rank.process.exitcode == UNTOLD for rank in died) and (end := _server_end()):
        return _server_ended(end, ranks, f"and ranks {[rank.rank for rank in died]} with it; {_roll(ranks)}")
    if not roots:
        return _hang(ranks, timeout_s, results)
    first = min(roots, key=lambda rank: rank.ended_at)
    others = [rank.rank for rank in bad if rank is not first]
    consequence = f"; ranks {others} were stopped or failed after it" if others else ""
    return LaunchError(
        where=f"rank {first.rank}",
        expected="every rank to finish",
        found=f"{_cause(first)}, last collective: {first.last}{consequence}",
        results=results,
    )


def _is_consequence(error: str) -> bool:
    return any(
        word in error for word in ("Connection closed", "Connection reset", "Broken pipe", "Read error", "Timed out")
    )


def _cause(rank: _Rank) -> str:
    if rank.error:
        said, _, place = rank.error.partition("\n")
        return f"{said[:300]} ({place})"
    code = rank.process.exitcode
    return _killed(-code) if code is not None and code < 0 else f"exited with code {code} without a result"


def _killed(number: int) -> str:
    """By which signal, in words."""
    hint = " (often the system's out-of-memory killer)" if number == signal.SIGKILL else ""
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}{hint}"


def _hang(ranks: list[_Rank], timeout_s: float, results: dict[int, Any]) -> LaunchError:
    """A roll-call: ranks grouped by their last collective, those furthest behind first: the others wait for them.

    A rank says which collective it enters before it is in it, so one that stops in between looks like those that wait for it. One that
    the system shows as stopped is named; where all that are left stand at the same place, nobody can tell which it was, and none is.
    """
    stopped = [rank for rank in ranks if not rank.done and _is_stopped(rank.process.pid)]
    waiting, roll = [rank for rank in ranks if not rank.done], _roll(ranks)
    alone = [rank for rank in waiting if rank.last == REFERENCE]
    if alone and len(alone) == len(waiting) and not stopped:
        return LaunchError(
            where="ranks " + str([rank.rank for rank in waiting]),
            expected=f"every rank to finish within {timeout_s:g} s",
            found=f"a run that is slow and does not hang: its steps are over, and ranks are at {REFERENCE}; {roll}",
            remedy="raise --timeout, or take fewer steps",
            results=results,
        )
    if not stopped and all(rank.gets_on for rank in waiting):
        return LaunchError(
            where="ranks " + str([rank.rank for rank in waiting]),
            expected=f"every rank to finish within {timeout_s:g} s",
            found=f"a run that is slow and does not hang: each entered another collective within the last {RECENT_S:g} s; {roll}",
            remedy="raise --timeout, or take fewer steps",
            results=results,
        )
    stuck = _stuck(ranks)
    first = stuck[0][1]
    named = [rank.rank for rank in stopped] or first
    where = f"rank {named[0]}" if len(named) == 1 or (len(stuck) > 1 and not stopped) else f"ranks {named}"
    cause = f"{_stopped_words(stopped)}; " if stopped else ""
    unknown = "; which of them did not arrive cannot be told" if where.startswith("ranks") and not stopped else ""
    return LaunchError(
        where=where,
        expected=f"every rank to finish within {timeout_s:g} s",
        found=f"a hang: {cause}{roll}{unknown}",
        remedy="raise --timeout if the run is only slow",
        results=results,
    )


def _stopped_words(stopped: list[_Rank]) -> str:
    last = ", ".join(dict.fromkeys(rank.last for rank in stopped))
    verb = "it is" if len(stopped) == 1 else "they are"
    return f"{verb} stopped (as by SIGSTOP or a debugger), last collective: {last}"


def _stuck(ranks: list[_Rank]) -> list[tuple[str, list[int]]]:
    """Ranks that have not finished, by their last collective, those furthest behind first."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.done:
            groups.setdefault(rank.last, []).append(rank.rank)
    return sorted(groups.items(), key=lambda item: (_place(item[0]), len(item[1])))


def _roll(ranks: list[_Rank]) -> str:
    """Where each rank stands, in words."""
    finished = [rank.rank for rank in ranks if rank.done]
    groups = [*_stuck(ranks), *([("finished", finished)] if finished else [])]
    return "; ".join(f"ranks {members} at {last}" for last, members in groups)


def _server_pid() -> int | None:
    """The fork server's process, None before the first one."""
    pid: int | None = vars(forkserver)["_forkserver"]._forkserver_pid  # private: Python has no other name for it
    return pid


def _server_end(*, patience_s: float = 0.0) -> str:
    """How the fork server ended, in words, or "" where it runs; it is our child, and whoever launches next starts another.

    `patience_s`: its connections close before the system says that it is over.
    """
    pid, limit = _server_pid(), time.monotonic() + patience_s
    try:
        while pid is not None:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return f"it exited with code {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"it was {_killed(ended.si_status)}"
            if time.monotonic() >= limit:
                return ""
            time.sleep(0.02)
    except ChildProcessError:
        return "it ended"
    return ""


def _server_ended(end: str, ranks: list[_Rank], when: str) -> LaunchError:
    """The process that ranks are forked from has ended; `end` and `when` say how."""
    return LaunchError(
        where="the fork server",
        expected="the process that starts ranks, and that tells how they end, to live until all are done",
        found=f"{end}, {when}",
        remedy="look who ended it; by itself it only loads torch, as `python -c 'import torch'` does",
        results={rank.rank: rank.result for rank in ranks if rank.result is not None},
    )


def _is_stopped(pid: int) -> bool:
    """Whether the system shows the process as stopped; False where it does not tell."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _place(last: str) -> int:
    """How many collectives a rank had entered, from what it said: "all_gather #3 of …" is 3; -1 for none, and more than
    any for one that is past all of them."""
    if last == REFERENCE:
        return sys.maxsize
    found = re.search(r"#(\d+)", last)
    return int(found[1]) if found else -1


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not stop the ending of ranks, which takes some seconds at most."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(ranks: list[_Rank]) -> None:
    """Nothing is left running: asked to stop, then killed, then reaped."""
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
            os.killpg(rank.process.pid, signal.SIGKILL)  # what the rank itself had started: it leads a session
        rank.process.close()
        rank.pipe.close()


def _rank_main(
    target: str, arguments: str, rank: int, world_size: int, port: int, pipe: Connection, progress: Any
) -> None:
    """What runs in a rank's process."""
    os.setsid()
    _die_with_controller()

    def say(text: str) -> None:
        progress.value = text.encode(errors="replace")[: PROGRESS_BYTES - 1].decode(errors="ignore").encode()

    def keep(part: Any) -> None:
        _send(pipe, json.dumps({"part": part}))

    try:
        module, _, name = target.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        given = {"rank": rank, "world_size": world_size, "port": port, "progress": say, "keep": keep}
        result = function(json.loads(arguments), **given)
        message, code = json.dumps({"result": result}), 0
    except BaseException as error:
        message, code = json.dumps({"error": _told(error)}), 1
    _send(pipe, message)
    pipe.close()
    os._exit(code)


def _told(error: BaseException) -> str:
    """The error's own first line, and below it where it was raised; what a library adds in further lines is left out."""
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = f'File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}' if frames else ""
    return f"{said}\n{place}"


def _send(pipe: Connection, message: str) -> None:
    """A message and the line's end; JSON has no line ends of its own."""
    data = memoryview(message.encode() + b"\n")
    while data:
        data = data[os.write(pipe.fileno(), data) :]


def _die_with_controller() -> None:
    """End with the controller, however it ended: by a thread of this rank, and on Linux, for a rank that is stopped, by the system.

    The system's signal comes when the fork server ends, and that ends when nobody holds its pipe any longer: a rank inherits the pipe
    and has to let go of it, or a stopped rank would keep the server and itself.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()
    server: Any = vars(forkserver)["_forkserver"]  # private: Python has no other name for the pipe
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _follow(sentinel: int) -> None:
    """End this rank, even inside a collective, when the controller is gone."""
    wait([sentinel])
    os._exit(1)
