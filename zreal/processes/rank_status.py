"""One rank as its controller sees it: what it has said so far, and how far it has come."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

READ_BYTES = 1 << 20
REFERENCE = "the single-process reference"
"""What a rank says that is past its last collective and trains by itself what its parameters are
compared with."""
RECENT_S = 3.0
"""A rank that has entered another collective within so many seconds of the timeout is slow and does
not hang."""


@dataclass(slots=True)
class Rank:
    """One rank as the controller sees it."""

    rank: int
    process: Any
    pipe: Connection
    progress: Any
    unread: bytearray = field(default_factory=bytearray)
    """The beginning of a message whose end has not come yet."""
    result: Any = None
    error: str = ""
    ended_at: float = 0.0
    done: bool = False
    moves: int = 0
    """How often it was seen at another collective than before."""
    moved_at: float = 0.0
    _seen: str = ""

    @property
    def last(self) -> str:
        """The last collective that the rank said it was entering."""
        text = bytes(self.progress).split(b"\0", 1)[0].decode(errors="replace")
        return text or "no collective yet"

    def look(self) -> None:
        """Note whether the rank has entered another collective since the last look."""
        last = self.last
        if last != self._seen:
            self._seen, self.moves, self.moved_at = last, self.moves + 1, time.monotonic()

    @property
    def gets_on(self) -> bool:
        """Whether it went from one collective to another a moment ago; who has only begun says
        nothing yet."""
        return self.moves > 2 and time.monotonic() - self.moved_at < RECENT_S

    def receive(self) -> None:
        """Take what the rank has sent: parts of its result, and at last the result or the error.

        A message ends with a line; one that has come in part is kept and never waited for, since
        its rank may have stopped in the middle of it.
        """
        with suppress(BlockingIOError):
            while data := os.read(self.pipe.fileno(), READ_BYTES):
                self.unread += data
                if b"\n" in data:
                    *messages, self.unread = self.unread.split(b"\n")
                    for message in messages:
                        self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        self.result = message.get("result", message.get("part", self.result))
        self.done, self.error = "result" in message, message.get("error", "")


def stuck(ranks: list[Rank]) -> list[tuple[str, list[int]]]:
    """Ranks that have not finished, by their last collective, those furthest behind first."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.done:
            groups.setdefault(rank.last, []).append(rank.rank)
    return sorted(groups.items(), key=lambda item: (_place(item[0]), len(item[1])))


def roll(ranks: list[Rank]) -> str:
    """Where each rank stands, in words."""
    finished = [rank.rank for rank in ranks if rank.done]
    groups = [*stuck(ranks), *([("finished", finished)] if finished else [])]
    return "; ".join(f"ranks {members} at {last}" for last, members in groups)


def _place(last: str) -> int:
    """How many collectives a rank had entered, from what it said: "all_gather #3 of …" is 3; -1 for
    none, and more than any for one that is past all of them."""
    if last == REFERENCE:
        return sys.maxsize
    found = re.search(r"#(\d+)", last)
    return int(found[1]) if found else -1
