"""Status of one rank as the controller sees it, and ranks by their last collective."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from zreal.processes.descendants import command_of
from zreal.processes.progress import Progress
from zsim.runs.launch.planned_collectives import number_of

READ_BYTES = 1 << 20
FORKED = "multiprocessing.forkserver"
"""Part of the command of each rank, which its forks have too."""
REFERENCE = "the single-process reference"
"""Progress of a rank that is past its last collective and trains the reference by itself."""
NO_COLLECTIVE = "no collective yet"
BUILDING = "building the module"
"""Progress of a rank that runs the user's own code, whose name follows."""
TIMED = "warm-up and timed steps"
MOST_COMMAND = 100
"""Characters of a command that a report shows."""
RECENT_S = 3.0
"""Seconds before the timeout: a rank that entered another collective within them is slow and does
not hang."""
MOVES_OF_A_RUN = 2
"""Collectives that a rank must have left before its progress counts as that of a run."""


@dataclass(slots=True)
class RankStatus:
    """Process, pipe and progress of one rank."""

    rank: int
    process: Any
    pipe: Connection
    progress: Progress
    server: int | None = None
    """Process id of the fork server that started it."""
    commands: Connection | None = None
    """Pipe to a rank that takes commands."""
    unread: bytearray = field(default_factory=bytearray)
    """Bytes of a message whose end has not arrived."""
    stack: list[bytes] = field(default_factory=list)
    """Frames of the rank that it has sent when it was asked for them, innermost first."""
    result: Any = None
    num_parts: int = 0
    """Parts of its result that it has sent."""
    error: str = ""
    replaced: str = ""
    """Text of how the rank has left its controller without an end."""
    ended_at: float = 0.0
    done: bool = False
    num_moves: int = 0
    """Changes of the last collective that the controller has seen."""
    moved_at: float = 0.0
    _seen_collective: str = ""

    def command(self, text: str) -> None:
        """Send a short command. The rank is not done again until it has answered; one that has died
        is seen by whoever waits for it."""
        assert self.commands is not None
        self.done, self.error, self.result, self.ended_at = False, "", None, 0.0
        with suppress(OSError):
            self.commands.send_bytes(text.encode())

    @property
    def last_collective(self) -> str:
        """The last collective that the rank announced before it entered it."""
        return (NO_COLLECTIVE, *self.progress.recent())[-1]

    def note_progress(self) -> None:
        """Note whether the rank has announced another collective since the last call."""
        last = self.last_collective
        if last != self._seen_collective:
            self._seen_collective, self.moved_at = last, time.monotonic()
            self.num_moves += 1

    @property
    def is_progressing(self) -> bool:
        """True where the rank entered another collective a moment ago."""
        recently = time.monotonic() - self.moved_at < RECENT_S
        return self.num_moves > MOVES_OF_A_RUN and recently

    def receive(self) -> None:
        """Read the messages that the rank has sent: parts of its result, its result or its error.

        A message is a line. An incomplete one is kept and never waited for, since its rank may have
        stopped in the middle of it. Lines without JSON are of a stack.
        """
        with suppress(BlockingIOError):
            while data := os.read(self.pipe.fileno(), READ_BYTES):
                self.unread += data
                if b"\n" in data:
                    *messages, self.unread = self.unread.split(b"\n")
                    for message in messages:
                        if message.startswith(b"{"):
                            self._take(json.loads(message))
                        elif message.startswith(b"  File "):
                            self.stack.append(bytes(message))
            self._note_closed_pipe()

    def _note_closed_pipe(self) -> None:
        """Note that a process lives whose pipe is closed: it can neither be commanded nor answer.

        The system shows no command of a process that ends, and closes its pipe thereafter.
        """
        command = "" if self.done or self.error else command_of(self.process.pid)
        if command:
            how = "has closed its connection to the controller"
            if FORKED not in command:
                how = f"executes another program in its place, {command[:MOST_COMMAND]}"
            self.replaced = self.error = how

    def _take(self, message: dict[str, Any]) -> None:
        self.result = message.get("result", message.get("part", self.result))
        self.num_parts += "part" in message
        self.done, self.error = "result" in message, message.get("error", "")


def unfinished_by_collective(ranks: list[RankStatus]) -> list[tuple[str, list[int]]]:
    """Unfinished ranks by their last collective, those furthest behind first."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.done:
            groups.setdefault(rank.last_collective, []).append(rank.rank)
    return sorted(groups.items(), key=lambda item: (_num_entered(item[0]), len(item[1])))


def different_collectives(ranks: list[RankStatus]) -> dict[str, list[int]]:
    """Unfinished ranks by their last collective, of those whose number is the highest. Empty where
    it is the same on all of them: op, bytes and group."""
    groups = unfinished_by_collective(ranks)
    most = max((_num_entered(last) for last, _ in groups), default=-1)
    last = {text: members for text, members in groups if _num_entered(text) == most}
    return last if len(last) > 1 and most >= 0 else {}


def phase(ranks: list[RankStatus], steps: int) -> str:
    """The phase of the rank that is furthest behind, as text, in a run of so many `steps`; "" once
    all are done. A rank sends a part after construction and after each step."""
    waiting = [rank for rank in ranks if not rank.done]
    if not waiting:
        return ""
    last = min(waiting, key=lambda rank: rank.num_parts)
    if last.num_parts == 0:
        is_building = last.last_collective.startswith(BUILDING)
        return last.last_collective if is_building else "construction"
    if last.num_parts <= steps:
        return f"step {last.num_parts} of {steps}"
    is_past = last.last_collective == REFERENCE
    return f"{REFERENCE}, then {TIMED}" if is_past else TIMED


def _num_entered(last_collective: str) -> int:
    """Collectives that a rank has entered: 3 for "all_gather #3 of …", -1 for none, and the largest
    number for a rank past all of them."""
    if last_collective == REFERENCE:
        return sys.maxsize
    return number_of(last_collective)
