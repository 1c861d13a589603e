"""SIGTERM, as schedulers of clusters send it, ends a command as Ctrl-C does: what it has started is
ended with it, and it says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated, unless the caller has a handler of its own; handlers are
    the main thread's business."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, neither a second Ctrl-C nor SIGTERM stops what takes some seconds at most, as ending
    ranks does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
