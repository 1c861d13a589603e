"""Independent cases on all cores, in forked processes where forking is safe and pays."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from time import process_time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

Case = TypeVar("Case")
Result = TypeVar("Result")

WORTH_S = 0.3
"""Processor time of the cases left from which on more processes pay. They cost 0.1 s: to import, to
fork, and to copy the pages that they write to."""

_inherited: list[Callable[[Any], Any]] = []
"""The function of a case, in a forked worker."""


def mapped(
    function: Callable[[Case], Result], cases: Sequence[Case], *,
    say: Callable[[int], None] | None = None,
) -> list[Result]:
    """`function` of each case, in order; the error of the first case that has one is raised. `say`
    is told how many are done.

    The first cases show how long the rest takes. Forked processes share the models already lowered.
    A fork copies one thread alone, so a process that has others, or torch's, goes through the cases
    by itself.
    """
    results: list[Result] = []
    begin = process_time()
    for done, case in enumerate(cases):
        if done and (process_time() - begin) / done * (len(cases) - done) > WORTH_S:
            workers = min(_cores(), len(cases) - done)
            if workers > 1 and _may_fork():
                for result in _forked(function, cases[done:], workers=workers):
                    results.append(result)
                    if say:
                        say(len(results))
                return results
        results.append(function(case))
        if say:
            say(len(results))
    return results


def in_turn(
    function: Callable[[Case], Result], cases: Iterable[Case], *, ahead: int
) -> Iterator[Result]:
    """`function` of each case, in order; a case is taken when the result `ahead` of it has been
    used, on which it may so depend.

    On all cores where that is safe, once cases have taken long enough.
    """
    begin, waiting = process_time(), deque[Callable[[], Result]]()
    with ExitStack() as stack:
        pool: ProcessPoolExecutor | None = None
        for case in cases:
            if pool is None and process_time() - begin > WORTH_S and _cores() > 1 and _may_fork():
                pool = stack.enter_context(_pool(function, workers=min(_cores(), ahead)))
            if pool is None:
                waiting.append(partial(_itself, function(case)))
            else:
                waiting.append(pool.submit(_called, case).result)
            if len(waiting) == ahead:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()


def _itself(result: Result) -> Result:
    return result


def _forked(
    function: Callable[[Case], Result], cases: Sequence[Case], *, workers: int
) -> Iterator[Result]:
    # a worker inherits the cases by the fork; numbers and results alone are pickled
    with _pool(lambda number: function(cases[number]), workers=workers) as pool:
        yield from pool.map(_called, range(len(cases)))


def _pool(function: Callable[[Any], Any], *, workers: int) -> ProcessPoolExecutor:
    # multiprocessing takes 20 ms to import, which few commands need
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    return ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_start, initargs=(function,)
    )


def _start(function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked it tells of Ctrl-C
    _inherited.append(function)


def _called(case: Any) -> Any:
    return _inherited[-1](case)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _may_fork() -> bool:
    return (
        sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1
    )
