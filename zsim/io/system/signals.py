"""Signals that end a command, or work in it. SIGTERM, which cluster schedulers send, ends it and
its child processes as Ctrl-C does, with a message. SIGALRM ends work at its time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


AGAIN_S = 1.0
"""Seconds after which a time limit is told again to work that goes on."""
STUCK_S = 3.0
"""Seconds after a time limit. Work that still goes on then is in a call that no signal ends."""
_commands: list[str] = []
"""Entries while a command line runs, whose process is its own to end."""


class TimeIsUp(BaseException):
    """The time limit of the work is over. No Exception: the work may catch all of its own."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Context manager in which SIGTERM raises Terminated, unless the caller has a handler of its
    own. It does nothing outside the main thread, which alone can have handlers."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    _commands.append("running")
    try:
        yield
    finally:
        _commands.pop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp


@contextmanager
def limited(seconds: float, *, stuck: Callable[[], None]) -> Iterator[None]:
    """Context manager in which TimeIsUp is raised after so many seconds, and again until its body
    ends. It sets no limit outside the main thread, which alone can have handlers.

    `stuck` is called in another thread where the body still runs a moment later, and where this is
    the process of a command line.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begin, over = time.monotonic(), threading.Event()
    handler = signal.signal(signal.SIGALRM, _time_is_up)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    if _commands:
        watch = partial(_when_stuck, over, seconds + STUCK_S, stuck)
        threading.Thread(target=watch, daemon=True, name="time limit").start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        over.set()
        signal.signal(signal.SIGALRM, handler)
        if left:  # of a caller's own timer
            rest = max(left - (time.monotonic() - begin), 0.001)
            signal.setitimer(signal.ITIMER_REAL, rest, interval)


def _when_stuck(over: threading.Event, seconds: float, stuck: Callable[[], None]) -> None:
    if not over.wait(seconds):
        stuck()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager in which neither a second Ctrl-C nor SIGTERM stops work of a few seconds,
    such as ending ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handlers_kept():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        yield


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Context manager after which SIGTERM and Ctrl-C do what they did before, whatever code inside
    has made of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
