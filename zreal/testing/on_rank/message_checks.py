"""Messages of a rank under test, its sends and receives: numbered, and held to the other rank's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from zsim.errors import RankError

SEND, RECEIVE = "send", "receive"
ANY = "any rank"


class MessageMismatchError(RankError):
    """A send and a receive of the same message that differ in size or dtype."""

    report = ""
    """The two of them, with their ranks."""


class Channel(NamedTuple):
    """Messages from one rank to another, which arrive in order."""

    source: str
    """`rank 0`, or `any rank` of a receive."""
    target: str
    nth_group: str
    tag: int

    def __str__(self) -> str:
        tag = f" with tag {self.tag}" * bool(self.tag)
        group = f" in {self.nth_group}" * (self.nth_group != "world")
        return f"from {self.source} to {self.target}{tag}{group}"


class MessageChecks:
    """Every send and receive of this rank."""

    def __init__(self, store: dist.Store, *, rank: int, progress: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        """Sends and receives, by `send` or `receive` and the channel."""
        self._store, self._rank, self._progress = store, rank, progress

    def enter(self, kind: str, channel: Channel, content: str) -> None:
        """Say and count a message; MessageMismatchError where the other rank has come to it with
        another content.

        Once a rank receives from any, it is not known which message a receive takes.
        """
        __tracebackhide__ = True
        number = self.counts[f"{kind} {channel}"]
        self.counts[f"{kind} {channel}"] += 1
        mine = f"{kind} #{number}{content} {channel}"
        self._progress(mine)
        from_any = channel._replace(source=ANY)
        if kind == RECEIVE and self.counts[f"{RECEIVE} {from_any}"]:
            return
        noted = self._store.compare_set(f"message/{channel}/{number}", "", f"{self._rank} {mine}")
        rank, _, other = noted.decode().partition(" ")
        if other.partition(" ")[2] != mine.partition(" ")[2]:
            error = MessageMismatchError(
                where="messages", expected=f"{other}, as on rank {rank}",
                found=f"{mine} on rank {self._rank}",
                remedy="give both the same number of elements and dtype, in the same order",
            )
            both = sorted([(int(rank), other), (self._rank, mine)])
            lines = [f"  rank {number}: {text}" for number, text in both]
            error.report = "\n".join(["ranks send and receive different messages", *lines])
            raise error
