"""Collectives that run at once over links they share: who can meet there, and when each ends at its
fair share.

Flow level: a collective's time alone is its work, latency included, and its speed is found anew at
each start and end. Knows no Program and no simulation library: the engine lends it a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Protocol

from zsim.engine.max_min_fairness import Usage, speeds


class Clock(Protocol):
    """The time of a simulation, in int nanoseconds."""

    def now(self) -> int:
        """The present."""
        ...

    def after(self, delay: int, call: Callable[[], None]) -> None:
        """Call `call` in `delay` nanoseconds."""
        ...


@dataclass(slots=True, eq=False)
class _Flow:
    """A running collective: nanoseconds at full speed that were left at `at`, and what to do at its
    end."""

    usage: Usage
    left: int | Fraction
    at: int
    ended: Callable[[], None]
    speed: int | Fraction = 0
    version: int = 0
    """Its end is scheduled anew whenever its speed changes; a call of an earlier version is void.
    """


class SharedLinks:
    """The collectives that run at present over links for which several compete.

    Which of them run decides their speeds, so each such set is worked out once; changes at one
    moment are worked out together.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.flows: dict[int, _Flow] = {}
        """By the number of what they use, of which only one runs at a time."""
        self.numbers: dict[int, int] = {}
        """By identity: what has been used so far, in the order in which it first was, so that no
        address decides anything."""
        self.known: dict[tuple[int, ...], tuple[int | Fraction, ...]] = {}
        self.is_stale = False

    def begin(self, usage: Usage, alone_ns: int, ended: Callable[[], None]) -> None:
        """From now on run a collective that takes `alone_ns` at full speed; `ended` is called when
        it is over.

        `usage` is the same object for all collectives of one group, and its last one is over.
        """
        flow = _Flow(usage=usage, left=alone_ns, at=self.clock.now(), ended=ended)
        self.flows[self.numbers.setdefault(id(usage), len(self.numbers))] = flow
        if len(self.flows) == 1:
            self._run(flow, 1)
        else:
            self._share_soon()

    def _share_soon(self) -> None:
        """Once everything else of this moment has happened, find the speeds anew."""
        if not self.is_stale:
            self.is_stale = True
            self.clock.after(0, self._share)

    def _share(self) -> None:
        self.is_stale = False
        running = tuple(sorted(self.flows))
        found = self.known.get(running)
        if found is None:
            exact = speeds([self.flows[key].usage for key in running])
            found = self.known[running] = tuple(1 if speed == 1 else speed for speed in exact)
        for key, speed in zip(running, found, strict=True):
            if self.flows[key].speed != speed:
                self._run(self.flows[key], speed)

    def _run(self, flow: _Flow, speed: int | Fraction) -> None:
        """From now on `flow` runs at `speed`."""
        now = self.clock.now()
        flow.left = max(0, flow.left - (now - flow.at) * flow.speed)
        flow.at, flow.speed, flow.version = now, speed, flow.version + 1
        version = flow.version

        def finish() -> None:
            if version == flow.version:
                del self.flows[self.numbers[id(flow.usage)]]
                if self.flows:
                    self._share_soon()
                flow.ended()

        self.clock.after(ceil(flow.left / speed) if speed != 1 else ceil(flow.left), finish)


def contended(groups: Sequence[Mapping[int, Mapping[str, Fraction]]]) -> list[Usage]:
    """For groups, by member what each takes of its links: what those use that can contend, nothing
    for the others.

    Groups contend when all that use some member's link, at full speed, need more of it than there
    is.
    """
    usages: list[dict[Hashable, Fraction]] = [
        {(rank, link): part for rank, parts in members.items() for link, part in parts.items()}
        for members in groups
    ]
    users: dict[Hashable, list[int]] = {}
    for index, usage in enumerate(usages):
        for link in usage:
            users.setdefault(link, []).append(index)
    full = [
        indices
        for link, indices in users.items()
        if len(indices) > 1 and sum(usages[index][link] for index in indices) > 1
    ]
    competing = {index for indices in full for index in indices}
    return [usage if index in competing else {} for index, usage in enumerate(usages)]
