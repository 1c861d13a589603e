"""The process of one rank: calls its function, reports to the controller, and ends with it."""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from zreal.processes.descendants import adopt_orphans, descendants
from zreal.processes.progress import Progress
from zreal.processes.reports.error_line import error_line
from zreal.processes.reports.stacks import answer_when_asked
from zreal.testbed.namespaces import IN_TESTBED, INTERFACE, PR_SET_PDEATHSIG, enter_host


def rank_main(
    target: str, arguments: str, rank: int, world_size: int, port: int, pipe: Connection,
    progress: Progress, host: Sequence[int] = (), commands: Connection | None = None,
) -> None:
    """Call `target` ("module:function") and send its result or error to the controller.

    It first moves to `host` of a testbed, if there is one, while it has no other thread.
    """
    os.setsid()
    if host:
        enter_host(*host)
        os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, IN_TESTBED: "1"}
    _die_with_controller()
    adopt_orphans()
    own = os.getpid()
    answer_when_asked(pipe.fileno())
    os.set_inheritable(pipe.fileno(), False)  # so it closes where this process executes a program

    def keep(part: Any) -> None:
        _send(pipe, json.dumps({"part": part}))

    try:
        module, _, name = target.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        result = function(
            json.loads(arguments), rank=rank, world_size=world_size, port=port,
            progress=progress.announce, keep=keep,
            **({} if commands is None else {"commands": Commands(commands, pipe)}),
        )
        message, code = json.dumps({"result": result}), 0
    except BaseException as error:
        message, code = json.dumps({"error": _error_text(error)}), 1
    if os.getpid() != own:  # a fork that has come out of the function: it is no rank
        os._exit(code)
    _send(pipe, message)
    pipe.close()
    os._exit(code)


class Commands:
    """Commands of the controller to this rank, each of which it answers."""

    def __init__(self, source: Connection, pipe: Connection) -> None:
        self._source, self._pipe = source, pipe

    def receive(self) -> str:
        """The next command; EOFError once the controller has closed the pipe."""
        return self._source.recv_bytes().decode()

    def answer(self, result: Any, *, error: str = "") -> None:
        """Answer by a result, with the line of the error where there is one."""
        message = {"part": result, "error": error} if error else {"result": result}
        _send(self._pipe, json.dumps(message))


def _error_text(error: BaseException) -> str:
    """The first line of the error, and on a second line the file and line that raised it."""
    first_line = error_line("".join(traceback.format_exception_only(error)))
    frames = traceback.extract_tb(error.__traceback__)
    raised_at = (
        f'File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}'
        if frames
        else ""
    )
    return f"{first_line}\n{raised_at}"


def _send(pipe: Connection, message: str) -> None:
    """Send a message as a line; JSON contains no line ends."""
    data = memoryview(message.encode() + b"\n")
    while data:
        data = data[os.write(pipe.fileno(), data) :]


def _die_with_controller() -> None:
    """End this rank when the controller ends: by a thread, and on Linux also by a signal, which
    reaches a stopped rank.

    Linux sends the signal when the fork server ends, and the server ends when its pipe closes. A
    rank inherits the pipe and closes it here, or a stopped rank would keep the server alive.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
    server: Any = vars(forkserver)["_forkserver"]  # private: Python has no other name for the pipe
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_after(sentinel: int) -> None:
    """Wait for the controller's end, then end this rank, even inside a collective, and what it has
    started."""
    wait([sentinel])
    for process in descendants([os.getpid()]):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    os.killpg(os.getpid(), signal.SIGKILL)
