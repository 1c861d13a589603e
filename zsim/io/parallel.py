"""Independent cases on all cores, in forked processes where forking is safe."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")

FEWEST = 3
"""Cases from which on processes save more than the 30 ms that starting them takes."""

_inherited: list[Callable[[int], Any]] = []
"""The function of a case by its number, in a forked worker."""


def mapped(function: Callable[[Case], Result], cases: Sequence[Case]) -> list[Result]:
    """`function` of each case, in order; the error of the first case that has one is raised.

    Forked processes share the models already lowered. A fork copies one thread alone, so a process
    that has others, or torch's, goes through the cases by itself.
    """
    workers = min(_cores(), len(cases))
    if workers < 2 or len(cases) < FEWEST or not _may_fork():
        return [function(case) for case in cases]
    # multiprocessing takes 20 ms to import, which few commands need
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # a worker inherits the cases by the fork; numbers and results alone are pickled
    with ProcessPoolExecutor(
        workers, get_context("fork"), initializer=_start,
        initargs=(lambda number: function(cases[number]),),
    ) as pool:
        return list(pool.map(_numbered, range(len(cases))))


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
