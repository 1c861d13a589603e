"""Calls of a body on a rank, each answered by its outcome: passed, failed, skipped, …"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from zreal.processes.rank_process import Commands
from zreal.testing.names import named
from zreal.testing.on_rank.collective_checks import CollectiveChecks, CollectiveMismatchError
from zreal.testing.on_rank.message_checks import MessageMismatchError
from zreal.testing.on_rank.rank import Rank

END, CALL = "end", "call"
"""Commands of the controller; a number follows the second."""
COPY = "copy_of_rank_"
"""Name of the file that a fork of a rank leaves when it comes out of the body; the rank follows."""
Told = Callable[[BaseException], tuple[str, str]]
"""The report of an error, and its place in the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Parts of a rank's process: its rank, checks and commands, and the folder of the run."""

    rank: Rank
    checks: CollectiveChecks
    commands: Commands
    folder: Path
    _pid: int = field(default_factory=os.getpid)

    def answer(self, outcome: dict[str, Any]) -> None:
        """Answer the last command. A fork of this process does not come here: it ends, and leaves
        the outcome in a file."""
        if os.getpid() != self._pid:
            text = outcome.get("text") or outcome["outcome"]
            (self.folder / f"{COPY}{self.rank.index}").write_text(text, encoding="utf-8")
            os._exit(1)
        failed = outcome["outcome"] == "failed"
        self.commands.answer(
            outcome | self.checks.told(), error=outcome["line"] if failed else ""
        )

    def answer_calls(self, call: Callable[[Any], object], tell: Told) -> None:
        """Call the body for each command, until the end is commanded.

        The file `call_NUMBER` has the values of a call, pickled.
        """
        while (command := self.commands.receive()) != END:
            self.answer(self._outcome(command.removeprefix(f"{CALL} "), call, tell))

    def _outcome(self, number: str, call: Callable[[Any], object], tell: Told) -> dict[str, Any]:
        try:
            values = pickle.loads((self.folder / f"call_{number}").read_bytes())
            result = call(values)
            if result is not None:
                file = self.folder / f"result_{number}_{self.rank.index}"
                file.write_bytes(pickle.dumps(result))
        except BaseException as error:
            return failure(error, tell)
        return {"outcome": "passed", "has_result": result is not None}


def copies_that_came_back(folder: Path, world_size: int) -> str:
    """The report of forks of ranks that came out of the body of the test, once; "" for none."""
    texts: dict[int, str] = {}
    for rank in range(world_size):
        file = folder / f"{COPY}{rank}"
        if file.exists():
            texts[rank] = file.read_text(encoding="utf-8")
            file.unlink()
    lines = [f"the fork of {named(list(texts))} came out of the test as well, and was ended there",
             "end a fork by os._exit in the body", *dict.fromkeys(texts.values())]
    return "\n".join(lines) if texts else ""


def failure(error: BaseException, tell: Told) -> dict[str, Any]:
    """The outcome of a body that has raised, with the time at which it did."""
    at, kind = time.monotonic(), _kind(error)
    text, crash = tell(error)
    reason = str(error) or type(error).__name__
    line = reason if kind in ("skipped", "xfailed") else error_line(error, crash)
    return {
        "outcome": kind, "text": text, "line": line, "at": at,
        "differs": isinstance(error, CollectiveMismatchError),
        "messages_differ": getattr(error, "report", ""),
    }


def error_line(error: BaseException, crash: str) -> str:
    """The type and first line of an error, and its place in the code."""
    first_line = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return f"{name}: {first_line}{crash}" if first_line else f"{name}{crash}"


def _kind(error: BaseException) -> str:
    hypothesis: Any = sys.modules.get("hypothesis.errors")
    if hypothesis and isinstance(error, hypothesis.UnsatisfiedAssumption):
        return "rejected"
    if isinstance(error, pytest.skip.Exception | unittest.SkipTest):
        return "skipped"
    return "xfailed" if isinstance(error, pytest.xfail.Exception) else "failed"


def call_function(rank: Rank, values: Any) -> object:
    """Call a function with its arguments, and with `rank` where it has an argument of that name."""
    function, arguments, named = values
    own = {"rank": rank} if "rank" in signature(function).parameters else {}
    return function(*arguments, **own, **named)


def function_error(error: BaseException) -> tuple[str, str]:
    """The report of an error in a function, and its place in the code."""
    information = pytest.ExceptionInfo.from_exception(trimmed(error))
    text = str(information.getrepr(style="long", chain=True))
    entries = information.traceback
    return text, f" ({Path(entries[-1].path).name}:{entries[-1].lineno + 1})" if entries else ""


def trimmed(error: BaseException) -> BaseException:
    """The error without the frames that call bodies; without torch's, where it is not at fault."""
    hidden = [__file__]
    if isinstance(error, CollectiveMismatchError | MessageMismatchError):
        hidden += ["/torch/", "/zreal/"]
    kept: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not any(part in frame.f_code.co_filename for part in hidden):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return error.with_traceback(kept)
