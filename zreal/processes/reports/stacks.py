"""The place in the code at which each rank of a hang is.

A rank announces a collective before it enters it. Ranks that hang at the same one and
wait have a stack in torch. A rank that never entered it is elsewhere. faulthandler answers a signal
also where Python does not run.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from zreal.processes.rank_status import RankStatus

ASK = getattr(signal, "SIGUSR1", None)
"""Signal that asks a rank for its stack; Windows has none."""
ANSWER_S = 0.5
"""Seconds in which a rank that is not stopped answers."""
FRAME = re.compile(rb'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
IN_A_COLLECTIVE = ("/torch/", "/zreal/meters/", "/zreal/executor/ring.py")
"""Parts of the names of files in which a rank waits for a collective."""


class Frame(NamedTuple):
    """The innermost frame of a rank's main thread."""

    file: str
    line: int
    function: str

    @property
    def waits(self) -> bool:
        """True where the rank has entered its collective, or waits for it."""
        return any(part in self.file for part in IN_A_COLLECTIVE)

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


def main_frame() -> Frame:
    """The innermost frame of this process's main thread, for another thread of it."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def answer_when_asked(descriptor: int) -> None:
    """Let this process write the stack of its main thread to `descriptor` when it is asked."""
    if ASK is not None:
        faulthandler.register(ASK, file=descriptor, all_threads=False)


def innermost_frames(ranks: Sequence[RankStatus]) -> dict[int, Frame]:
    """The innermost frame of each of `ranks` that answers, by rank."""
    return {rank: frames[0] for rank, frames in stacks(ranks).items()}


def stacks(ranks: Sequence[RankStatus]) -> dict[int, tuple[Frame, ...]]:
    """The frames of each of `ranks` that answers, innermost first, by rank."""
    able = [rank for rank in ranks if ASK is not None and _answers(rank.process.pid)]
    for rank in able:
        rank.stack.clear()
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid, ASK or 0)
    limit, lengths = time.monotonic() + ANSWER_S, [-1]
    while time.monotonic() < limit and not (
        all(lengths) and lengths == [len(rank.stack) for rank in able]
    ):
        lengths = [len(rank.stack) for rank in able]
        time.sleep(0.01)  # a stack comes line by line
        for rank in able:
            rank.receive()
    frames = {
        rank.rank: tuple(
            Frame(match["file"].decode(), int(match["line"]), match["function"].decode())
            for match in map(FRAME.search, rank.stack) if match
        )
        for rank in able
    }
    return {rank: stack for rank, stack in frames.items() if stack}


def _answers(pid: int) -> bool:
    """True for a process that catches the signal, which ends any other."""
    with suppress(OSError, StopIteration, ValueError), open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return ASK is not None and bool(int(caught.split()[1], 16) >> (ASK - 1) & 1)
    return False
