"""Independent cases on all cores, in forked processes where forking is safe and pays."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from time import process_time
from typing import Any, TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")

WORTH_S = 0.3
"""Processor time of the cases left from which on more processes pay. They cost 0.1 s: to import, to
fork, and to copy the pages that they write to."""

_inherited: list[Callable[[int], Any]] = []
"""The function of a case by its number, in a forked worker."""


def mapped(
    function: Callable[[Case], Result], cases: Sequence[Case], *,
    say: Callable[[int], None] | None = None, each_s: float = 0.0,
) -> list[Result]:
    """`function` of each case, in order; the error of the first case that has one is raised. `say`
    is told how many are done.

    The first cases show how long the rest takes, unless `each_s` says how long those before took.
    Forked processes share the models already lowered. A fork copies one thread alone, so a process
    that has others, or torch's, goes through the cases by itself.
    """
    results: list[Result] = []
    begin = process_time()
    for done, case in enumerate(cases):
        took = (process_time() - begin) / done if done else each_s
        if (done or each_s) and took * (len(cases) - done) > WORTH_S:
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


def _forked(
    function: Callable[[Case], Result], cases: Sequence[Case], *, workers: int
) -> Iterator[Result]:
    # multiprocessing takes 20 ms to import, which few commands need
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # a worker inherits the cases by the fork; numbers and results alone are pickled
    with ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_start,
        initargs=(lambda number: function(cases[number]),),
    ) as pool:
        yield from pool.map(_numbered, range(len(cases)))


def _start(function: Callable[[int], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked it tells of Ctrl-C
    _inherited.append(function)


def _numbered(number: int) -> Any:
    return _inherited[-1](number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _may_fork() -> bool:
    return (
        sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1
    )
