"""Ranks that wait for others that never come: the test has ended there, or they wait as well."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zreal.processes.rank_status import RankStatus
from zreal.processes.reports.stacks import stacks
from zreal.testing.judgement.roll_call import roll_call
from zreal.testing.names import is_member, named, without_nth
from zreal.testing.on_rank.message_checks import ANY, RECEIVE, SEND
from zsim.io.system.processes import ticks_asleep
from zsim.runs.launch.planned_collectives import number_of

MESSAGE = re.compile(
    rf"({SEND}|{RECEIVE}) #\d+ .*?(?P<channel>from (?P<source>rank \d+|{ANY}) to "
    r"rank (?P<target>\d+)(?P<rest>.*))"
)
"""A message as a rank announces it."""
LEFT_OUT = "look for a condition on the rank, or a loop with fewer turns there, as of a short batch"
CROSSED = (
    "let all ranks take groups in the same order, and of two ranks that exchange messages one "
    "receive first"
)
STILL_S = 2.0
"""Seconds in which no rank announces anything, before it is asked whether all wait."""
IDLE_S = 1.0
"""Seconds in which no rank takes time of a core, as one that moves data does."""


def stranded(ranks: Sequence[RankStatus]) -> str:
    """The report of ranks that wait for a rank on which the test has ended; "" where none is seen
    to."""
    waits: dict[int, list[int]] = {}
    for rank in ranks:
        absent = [] if rank.done else _absent(rank, ranks)
        ended = [other.rank for other in absent if other.done]
        if ended and (len(ended) == len(absent) or not _is_from_any(rank)):
            waits[rank.rank] = ended
    head = "ranks were left waiting: the test has ended on ranks that they wait for"
    return _report(head, ranks, waits, remedy=LEFT_OUT)


def deadlock(ranks: Sequence[RankStatus]) -> str:
    """The report of ranks that all wait for others, by what they have announced; "" where one does
    not."""
    waiting = [rank for rank in ranks if not rank.done]
    waits = {rank.rank: [other.rank for other in _absent(rank, ranks)] for rank in waiting}
    if not all(waits.values()):
        return ""
    return _report("all ranks wait, and none can go on", ranks, waits, remedy=CROSSED)


def held_up(ranks: Sequence[RankStatus]) -> str:
    """Lines on ranks whose stacks show that they wait for others, with those others."""
    waiting = [rank for rank in ranks if not rank.done]
    frames, alike = stacks(waiting), dict[tuple[str, str], list[int]]()
    for rank in waiting:
        absent = [other.rank for other in _absent(rank, ranks)]
        if absent and rank.rank in frames and frames[rank.rank][0].waits:
            alike.setdefault((rank.last_collective, named(absent)), []).append(rank.rank)
    return "".join(
        f"{named(those)} {'waits' if len(those) == 1 else 'wait'} in {last} for {others}\n"
        for (last, others), those in alike.items()
    )


@dataclass(slots=True)
class DeadlockWatch:
    """Tells a deadlock from ranks that have announced much and are at work."""

    _ticks: Sequence[int | None] = ()
    _since: float = 0.0

    def sees(self, ranks: Sequence[RankStatus]) -> bool:
        """True once all ranks that have not ended wait in torch, and none has worked for a while.
        """
        waiting = [rank for rank in ranks if not rank.done]
        now = time.monotonic()
        is_still = all(rank.moved_at and now - rank.moved_at >= STILL_S for rank in waiting)
        ticks = [ticks_asleep(rank.process.pid) for rank in waiting] if is_still else []
        if not ticks or None in ticks or any(rank.error for rank in ranks) or not deadlock(ranks):
            self._ticks = ()
        elif ticks != self._ticks:
            self._ticks, self._since = ticks, now
        elif now - self._since >= IDLE_S:
            self._since = now
            frames = stacks(waiting)
            return all(rank.rank in frames and frames[rank.rank][0].waits for rank in waiting)
        return False


def unmatched(messages: Sequence[dict[str, int]]) -> list[str]:
    """Lines on messages that were sent and never received, or the opposite, by what ranks have
    counted. Where a rank receives from any, it is all that it receives against all sent to it."""
    counts: Counter[tuple[str, str]] = Counter()
    for key, count in (pair for each in messages for pair in each.items()):
        kind, _, channel = key.partition(" ")
        target = channel[channel.index("to rank ") :]
        from_any = f"{RECEIVE} from {ANY} {target}"
        counts[target if any(from_any in each for each in messages) else channel, kind] += count
    return [
        f"  {channel}: {counts[channel, SEND]} sent, {counts[channel, RECEIVE]} received"
        for channel in sorted({channel for channel, _ in counts})
        if counts[channel, SEND] != counts[channel, RECEIVE]
    ]


def _report(
    head: str, ranks: Sequence[RankStatus], waits: dict[int, list[int]], *, remedy: str
) -> str:
    lines = [
        f"rank {rank.rank} waits in {rank.last_collective} for {named(waits[rank.rank])}"
        for rank in ranks if rank.rank in waits
    ]
    return "\n".join([head, *lines, remedy, roll_call(ranks)]) if lines else ""


def _is_from_any(rank: RankStatus) -> bool:
    return f" from {ANY} to " in rank.last_collective


def _absent(rank: RankStatus, ranks: Sequence[RankStatus]) -> list[RankStatus]:
    """Ranks that have not come, as far as is known, to what this rank has announced last."""
    last = rank.last_collective
    number, key = number_of(last), _key(last)
    message = MESSAGE.match(last)
    if message is None:
        return [
            other for other in ranks
            if is_member(other.rank, key) and _entered(other, key) <= number
        ]
    peers = [other for other in ranks if f"rank {other.rank}" == message["source"]]
    if last.startswith(SEND):
        (target,) = (other for other in ranks if other.rank == int(message["target"]))
        from_any = f"{RECEIVE} from {ANY} to rank {target.rank}{message['rest']}"
        received = _entered(target, f"{RECEIVE} {message['channel']}") + _entered(target, from_any)
        return [target] if received <= number else []
    if not _is_from_any(rank):
        return [peer for peer in peers if _entered(peer, f"{SEND} {message['channel']}") <= number]
    group = without_nth(message["rest"].partition(" in ")[2] or "world")
    others = [other for other in ranks if other is not rank and is_member(other.rank, group)]
    channel = f"to rank {rank.rank}{message['rest']}"
    sent = sum(_entered(other, f"{SEND} from rank {other.rank} {channel}") for other in others)
    return others if sent <= number else []


def _key(text: str) -> str:
    """The group of a collective as a rank announces it; the kind and channel of a message."""
    message = MESSAGE.match(text)
    if message is None:
        return without_nth(text.partition(" over ")[2])
    return f"{message[1]} {message['channel']}"


def _entered(rank: RankStatus, key: str) -> int:
    """Collectives of a group, or messages of a channel, that a rank has come to.

    A rank that has ended has counted them; another has announced the latest.
    """
    if rank.done:
        return int((rank.result["counts"] | rank.result["messages"]).get(key, 0))
    lately = (number_of(text) + 1 for text in rank.progress.recent() if _key(text) == key)
    return max(lately, default=0)
