"""Ranks of a test: processes with a process group that answer calls, until they are ended.

They hold nothing of the test's own; `zreal.processes.launch` starts, supervises and ends them.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest

from zreal.processes.descendants import descendants
from zreal.processes.launch import attend, started
from zreal.processes.rank_status import RankStatus
from zreal.testing.judgement.leftovers import MARK, Known, end_leftovers, leftovers
from zreal.testing.judgement.roll_call import roll_call
from zreal.testing.judgement.verdict import RanksFailed, judge
from zreal.testing.judgement.waits import DeadlockWatch, held_up, stranded, unmatched
from zreal.testing.on_rank.bodies import CALL, END, copies_that_came_back
from zreal.testing.session import environment
from zsim.errors import ArgumentError

Backend = Literal["gloo", "nccl"]
TARGET = "zreal.testing.on_rank.rank_session:serve"
PRELOAD = ("zreal.testing.on_rank.preloaded",)
SETUP_S = 120.0
"""Seconds, besides the timeout, in which imports and fixtures may end: the first start loads torch.
"""
GENTLE_S = 5.0
"""Seconds in which ranks of a failed test may tear down their fixtures."""


class _Stranded(Exception):  # noqa: N818 - no error, but a reason to wait no longer
    pass


@dataclass(slots=True, kw_only=True)
class Ranks:
    """Processes of a world, started when they are first called, and again after a failure."""

    world_size: int
    backend: Backend = "gloo"
    timeout_s: float
    session: dict[str, Any] | None = None
    """Session of pytest in which the ranks answer calls (`zreal.testing.session`)."""
    folder: Path
    """Folder of output, logs and values, which only this user can read; removed at the end."""
    left: list[str] = field(default_factory=list)
    """Commands of processes that the ranks have left behind, which were ended."""
    warnings: list[tuple[str, str, str, int]] = field(default_factory=list)
    """Warnings of the ranks: text, category, file, line."""
    _ranks: list[RankStatus] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _mark: str = ""
    _numbers: Any = field(default_factory=count)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start the ranks, and wait until all are at the body. RanksFailed where a fixture fails.
        """
        if self._ranks:
            return
        self._mark = uuid.uuid4().hex
        arguments = {
            "folder": str(self.folder), "backend": self.backend, "session": self.session,
            "environment": environment(self.session) | {MARK: self._mark}, "cwd": os.getcwd(),
            "path": sys.path,
        }
        self._ranks = self._stack.enter_context(started(
            TARGET, arguments, world_size=self.world_size, preload=PRELOAD, commanded=True
        ))
        self._attend("the set-up of the test", self.timeout_s + SETUP_S)

    def call(self, values: object, *, is_example: bool = False) -> list[Any]:
        """Call the body with `values` on all ranks, and return what each returned, by rank.

        See `judge` for what it raises. Ranks that fail are ended. Of hypothesis' examples many may
        fail, so after those ranks go on if all have entered the same collectives.
        """
        number = next(self._numbers)
        data = _pickled(values)
        self.start()
        file = self.folder / f"call_{number}"
        file.write_bytes(data)
        self._command(f"{CALL} {number}")
        self._attend("the test", self.timeout_s, goes_on=is_example)
        self._require_no_copies()
        file.unlink()
        return [self._result(number, rank) for rank in self._ranks]

    def finish(self) -> None:
        """Let the ranks tear down their fixtures and end; RanksFailed if they fail, or leave
        processes."""
        if not self._ranks:
            return
        self._command(END)
        self._attend("the teardown of the test", self.timeout_s, ending=True)
        repeated = [warning for rank in self._ranks for warning in rank.result.get("warnings", ())]
        self.warnings += dict.fromkeys(map(tuple, repeated))
        self.left += leftovers(self._mark, sessions=self._sessions(), known=self._below())
        self.stop()
        self._require_no_copies()

    def stop(self) -> None:
        """End the ranks, whatever they do, and what they have started."""
        sessions, below = self._sessions(), self._below()
        self._ranks = []
        self._stack.close()
        if sessions:
            end_leftovers(self._mark, sessions=sessions, known=below)

    def _below(self) -> Known:
        """Processes below the ranks: those of ranks that run, and what those that have ended told.
        """
        ended = [rank.result for rank in self._ranks if isinstance(rank.result, dict)]
        left = {(pid, began) for result in ended for pid, began in result.get("left", ())}
        live = [rank.process.pid for rank in self._ranks if rank.process.exitcode is None]
        return left | {(process.pid, process.began) for process in descendants(live)}

    def _require_no_copies(self) -> None:
        """RanksFailed where a fork of a rank has come out of a body."""
        if copies := copies_that_came_back(self.folder, self.world_size):
            self.end()
            raise RanksFailed(copies)

    def _sessions(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def _command(self, text: str) -> None:
        for rank in self._ranks:
            rank.command(text)

    def _attend(
        self, activity: str, timeout_s: float, *, ending: bool = False, goes_on: bool = False
    ) -> None:
        """Wait for the answers of all ranks, and judge them; ranks that fail are stopped."""
        try:
            is_deadlock = self._wait(activity, time.monotonic() + timeout_s, ending=ending)
            judge(self._ranks, timeout_s=timeout_s, activity=activity, is_deadlock=is_deadlock)
        except RanksFailed:
            if not goes_on or not self._stand_together():
                self.end()
            raise

    def _places(self) -> str:
        """The ranks that have not ended, with what each does and waits for."""
        return f"{held_up(self._ranks)}{roll_call(self._ranks)}"

    def _stand_together(self) -> bool:
        """True where all ranks have answered, after the same collectives, and no message is on its
        way."""
        answers = [rank.result for rank in self._ranks if self._has_answered(rank)]
        return (
            len(answers) == self.world_size
            and all(each["counts"] == answers[0]["counts"] for each in answers)
            and not unmatched([each["messages"] for each in answers])
        )

    def end(self) -> None:
        """End the ranks; fixtures are torn down first where no rank has died or waits."""
        if all(self._has_answered(rank) for rank in self._ranks):
            self._command(END)
            self._wait("its end", time.monotonic() + GENTLE_S, ending=True)
        self.stop()

    @staticmethod
    def _has_answered(rank: RankStatus) -> bool:
        is_alive = rank.process.exitcode is None
        return is_alive and isinstance(rank.result, dict) and "counts" in rank.result

    def _wait(self, activity: str, deadline: float, *, ending: bool) -> bool:
        """Wait until all ranks are done, or cannot be; True for a deadlock.

        Whoever interrupts it is told what each rank does: the user by a note, pytest-timeout by
        RanksFailed.
        """
        watch, is_deadlock = DeadlockWatch(), False

        def look(ranks: Sequence[RankStatus]) -> None:
            nonlocal is_deadlock
            is_deadlock = watch.sees(ranks)
            if is_deadlock or stranded(ranks):
                raise _Stranded

        try:
            with suppress(_Stranded):
                attend(self._ranks, deadline=deadline, look=look, ending=ending)
        except KeyboardInterrupt as interruption:
            interruption.add_note(self._places())
            raise
        except pytest.fail.Exception as limit:
            raise RanksFailed(f"{activity}: {limit.msg}\n{self._places()}") from None
        return is_deadlock

    def _result(self, number: int, rank: RankStatus) -> Any:
        if not rank.result.get("has_result"):
            return None
        file = self.folder / f"result_{number}_{rank.rank}"
        value = pickle.loads(file.read_bytes())
        file.unlink()
        return value


def _pickled(values: object) -> bytes:
    try:
        return pickle.dumps(values)
    except Exception as error:
        raise ArgumentError(
            where="a call of ranks",
            expected="a function at the top of a module, and values that pickle can write",
            found=f"{type(error).__name__}: {error}",
            remedy="make in the body what cannot be sent, as from a seed",
        ) from error
