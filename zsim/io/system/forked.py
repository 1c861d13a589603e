"""Forked processes that are asked one case after another, and share what this one has in memory.

A pool of multiprocessing takes 45 ms more: to import, to start its threads, and to end. A process
that forks has one thread (`zsim.io.system.parallel` sees to it).
"""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, BinaryIO, Generic, NamedTuple, NoReturn, TypeVar

from zsim.errors import ZsimError

Case = TypeVar("Case")
Result = TypeVar("Result")

SIGNAL_S = 1.0
"""Seconds after which waiting begins anew: Python acts on a signal between two calls of the system,
and one that comes just before such a call does not interrupt it."""


class _Worker(NamedTuple):
    pid: int
    questions: BinaryIO
    answers: BinaryIO


class Workers(Generic[Case, Result]):
    """A function of cases, in as many forked processes as `count`; they end with the context."""

    def __init__(self, function: Callable[[Case], Result], *, count: int) -> None:
        self._function = function
        self._idle = [_forked(function) for _ in range(count)]
        self._busy: dict[BinaryIO, tuple[_Worker, int]] = {}
        self._cases: list[Case] = []
        self._waiting = deque[int]()
        self._answers: dict[int, tuple[bool, Any]] = {}

    def __enter__(self) -> Workers[Case, Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in (*self._idle, *(worker for worker, _ in self._busy.values())):
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            worker.answers.close()
            with suppress(BrokenPipeError):  # a question that it was killed before
                worker.questions.close()

    def ask(self, case: Case) -> Callable[[], Result]:
        """Hand `case` to the first process that is idle. Returns what waits for the result, and
        raises the error that the case has; ZsimError where the process has been killed."""
        number = len(self._cases)
        self._cases.append(case)
        self._waiting.append(number)
        self._hand_out()
        return lambda: self._result(number)

    def _hand_out(self) -> None:
        while self._idle and self._waiting:
            worker, number = self._idle.pop(), self._waiting.popleft()
            self._busy[worker.answers] = worker, number
            with suppress(BrokenPipeError):  # it has been killed, which reading its answer tells
                pickle.dump(self._cases[number], worker.questions)
                worker.questions.flush()

    def _result(self, number: int) -> Result:
        while number not in self._answers:
            for answers in select.select([*self._busy], [], [], SIGNAL_S)[0]:
                try:
                    answer = pickle.load(answers)
                except (EOFError, pickle.UnpicklingError):
                    raise ZsimError(
                        where="a forked process", expected="the result of its case",
                        found="no answer: it was killed",
                    ) from None
                worker, answered = self._busy.pop(answers)
                self._answers[answered] = answer
                self._idle.append(worker)
            self._hand_out()
        done, result = self._answers.pop(number)
        # the error of a case that has failed is raised where it can be traced
        return result if done else self._function(self._cases[number])


def _forked(function: Callable[[Any], Any]) -> _Worker:
    """A process that answers each case with whether `function` has a result, and the result."""
    (for_case, to_worker), (from_worker, for_answer) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(to_worker)
        os.close(from_worker)
        _answer_all(function, os.fdopen(for_case, "rb"), os.fdopen(for_answer, "wb"))
    os.close(for_case)
    os.close(for_answer)
    return _Worker(pid, os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb"))


def _answer_all(
    function: Callable[[Any], Any], questions: BinaryIO, answers: BinaryIO
) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked it tells of Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            case = pickle.load(questions)
            try:
                answer = pickle.dumps((True, function(case)))
            except Exception:
                answer = pickle.dumps((False, None))
            answers.write(answer)
            answers.flush()
    finally:  # also at the end of questions; nothing of the process that forked it is done again
        os._exit(0)
