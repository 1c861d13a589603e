"""Independent cases on all cores, in forked processes where forking is safe and pays."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from time import process_time
from typing import TypeVar

from zsim.io.system.forked import Workers

Case = TypeVar("Case")
Result = TypeVar("Result")

WORTH_S = 0.05
"""Processor time of the cases left from which on more processes pay. They cost 10 ms: to fork, and
to copy the pages that they write to."""


def mapped(
    function: Callable[[Case], Result], cases: Sequence[Case], *, at_once: bool = False,
    say: Callable[[int], None] | None = None,
) -> list[Result]:
    """`function` of each case, in order; the error of the first case that has one is raised. `say`
    is told how many are done.

    The first cases show how long the rest takes, unless that is known to be worth more processes
    `at_once`. Forked ones share the models already lowered. A fork copies one thread alone, so a
    process that has others, or torch's, goes through the cases by itself.
    """
    results: list[Result] = []
    begin, workers = process_time(), min(_cores(), len(cases))
    with ExitStack() as stack:
        waiting = deque[Callable[[], Result]]()
        for done, case in enumerate(cases):
            left_s = (process_time() - begin) / done * (len(cases) - done) if done else 0
            pays = left_s > WORTH_S if done else at_once
            if pays and not waiting and workers > 1 and _may_fork():
                # a worker inherits the cases by the fork; numbers and results alone are pickled
                forked = Workers[int, Result](lambda number: function(cases[number]), count=workers)
                ask = stack.enter_context(forked).ask
                waiting.extend(ask(number) for number in range(done, len(cases)))
            results.append(waiting.popleft()() if waiting else function(case))
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
        ask: Callable[[Case], Callable[[], Result]] | None = None
        for case in cases:
            if ask is None and process_time() - begin > WORTH_S and _cores() > 1 and _may_fork():
                ask = stack.enter_context(Workers(function, count=min(_cores(), ahead))).ask
            waiting.append(partial(_itself, function(case)) if ask is None else ask(case))
            if len(waiting) == ahead:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()


def _itself(result: Result) -> Result:
    return result


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _may_fork() -> bool:
    return (
        sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1
    )
