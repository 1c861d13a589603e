"""Contention of collectives that run at once over shared links: the groups that can contend, and
the end of each collective at its fair share.

A model of flows: a collective's time alone is its work, latency included, and its speed is computed
again at each start and end. Programs and simulation libraries play no part: the engine lends a
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Protocol

from zsim.engine.contention.max_min_fairness import Usage, speeds


class Clock(Protocol):
    """The time of a simulation, in int nanoseconds."""

    def now(self) -> int:
        """The present."""
        ...

    def after(self, delay: int, call: Callable[[], None]) -> None:
        """Call `call` in `delay` nanoseconds."""
        ...

    def run(self) -> None:
        """Make every call, until none is left."""
        ...


@dataclass(slots=True, eq=False)
class _Flow:
    """A running collective: nanoseconds at full speed that were left at `at`, and the callback of
    its end."""

    usage: Usage
    left: int | Fraction
    at: int
    ended: Callable[[], None]
    speed: int | Fraction = 0
    version: int = 0
    """Number of the schedule of its end, a new one at each change of speed. A call of an earlier
    version is void."""


class SharedLinks:
    """The running collectives that share links with others.

    The set of running collectives decides their speeds, so the speeds of each set are computed
    once. Changes at one moment are computed together.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.flows: dict[int, _Flow] = {}
        """Running flows by the number of their usage, at most one of each usage."""
        self.numbers: dict[int, int] = {}
        """Numbers of usages by identity, in the order of first use, so that no address decides
        anything."""
        self.known: dict[tuple[int, ...], tuple[int | Fraction, ...]] = {}
        self.are_modest: list[bool] = []
        """True where a flow alone needs no more than any whole link, by number of its usage. A flow
        for all ranks of a node may need more."""
        self.is_stale = False

    def begin(self, usage: Usage, alone_ns: int, ended: Callable[[], None]) -> None:
        """Run a collective that takes `alone_ns` at full speed from now on; call `ended` after it.

        `usage` is the same object for all collectives of one group, whose last one is over.
        """
        flow = _Flow(usage=usage, left=alone_ns, at=self.clock.now(), ended=ended)
        number = self.numbers.setdefault(id(usage), len(self.numbers))
        if number == len(self.are_modest):
            self.are_modest.append(max(usage.values(), default=0) <= 1)
        self.flows[number] = flow
        if len(self.flows) == 1 and self.are_modest[number]:
            self._run(flow, 1)
        else:
            self._share_soon()

    def _share_soon(self) -> None:
        """Compute the speeds again once everything else of this moment has happened."""
        if not self.is_stale:
            self.is_stale = True
            self.clock.after(0, self._share)

    def _share(self) -> None:
        self.is_stale = False
        running = tuple(sorted(self.flows))
        shares = self.known.get(running)
        if shares is None:
            exact = speeds([self.flows[key].usage for key in running])
            shares = self.known[running] = tuple(1 if speed == 1 else speed for speed in exact)
        for key, speed in zip(running, shares, strict=True):
            if self.flows[key].speed != speed:
                self._run(self.flows[key], speed)

    def _run(self, flow: _Flow, speed: int | Fraction) -> None:
        """Run `flow` at `speed` from now on."""
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
    """The usage of each group that can contend; an empty one for the others.

    `groups` have, by member and kind of link, the share that a collective takes at full speed.
    Groups contend when all groups on one link together need more than the whole link.
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
