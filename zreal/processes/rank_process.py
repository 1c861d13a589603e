"""What runs in a rank's process: the function that it is given, what it says of itself, and its end
when its controller is gone."""

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
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

PROGRESS_BYTES = 200
PR_SET_PDEATHSIG = 1
"""Of Linux's <sys/prctl.h>: the signal that a process gets when its parent ends."""


def rank_main(
    target: str, arguments: str, rank: int, world_size: int, port: int, pipe: Connection,
    progress: Any,
) -> None:
    """What runs in a rank's process."""
    os.setsid()
    _die_with_controller()

    def say(text: str) -> None:
        progress.value = (
            text.encode(errors="replace")[: PROGRESS_BYTES - 1].decode(errors="ignore").encode()
        )

    def keep(part: Any) -> None:
        _send(pipe, json.dumps({"part": part}))

    try:
        module, _, name = target.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        given = {
            "rank": rank, "world_size": world_size, "port": port, "progress": say, "keep": keep
        }
        result = function(json.loads(arguments), **given)
        message, code = json.dumps({"result": result}), 0
    except BaseException as error:
        message, code = json.dumps({"error": _told(error)}), 1
    _send(pipe, message)
    pipe.close()
    os._exit(code)


def _told(error: BaseException) -> str:
    """The error's own first line, and below it where it was raised; what a library adds in further
    lines is left out."""
    said = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = (
        f'File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}'
        if frames
        else ""
    )
    return f"{said}\n{place}"


def _send(pipe: Connection, message: str) -> None:
    """A message and the line's end; JSON has no line ends of its own."""
    data = memoryview(message.encode() + b"\n")
    while data:
        data = data[os.write(pipe.fileno(), data) :]


def _die_with_controller() -> None:
    """End with the controller, however it ended: by a thread of this rank, and on Linux, for a rank
    that is stopped, by the system.

    The system's signal comes when the fork server ends, and that ends when nobody holds its pipe
    any longer: a rank inherits the pipe and has to let go of it, or a stopped rank would keep the
    server and itself.
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
