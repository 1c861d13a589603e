"""Collectives that run at once over links they share: who can meet there, and when each ends at its fair share.

Flow level: a collective's time alone is its work, latency included, and its speed is found anew at each start and end. Knows
no Program and no simulation library: the engine lends it a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Protocol

from zsim.sharing import Usage, speeds


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
    """A running collective: nanoseconds at full speed that were left at `at`, and what to do at its end."""

    usage: Usage
    left: Fraction
    at: int
    ended: Callable[[], None]
    speed: Fraction = Fraction(0)
    version: int = 0
    """Its end is scheduled anew whenever its speed changes; a call of an earlier version is void."""


class SharedLinks:
    """The collectives that run at present over links for which several compete."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.flows: list[_Flow] = []

    def begin(self, usage: Usage, alone_ns: int, ended: Callable[[], None]) -> None:
        """From now on run a collective that takes `alone_ns` at full speed; `ended` is called when it is over."""
        self._share([*self.flows, _Flow(usage=usage, left=Fraction(alone_ns), at=self.clock.now(), ended=ended)])

    def _share(self, flows: list[_Flow]) -> None:
        """From now on `flows` run, each at its fair share; the ends of those whose share changes are scheduled anew."""
        now = self.clock.now()
        self.flows = flows
        for flow, speed in zip(flows, speeds([flow.usage for flow in flows]), strict=True):
            if speed != flow.speed:
                flow.left = max(Fraction(0), flow.left - (now - flow.at) * flow.speed)
                flow.at, flow.speed, flow.version = now, speed, flow.version + 1
                self._schedule(flow, flow.version)

    def _schedule(self, flow: _Flow, version: int) -> None:
        def finish() -> None:
            if version == flow.version:
                self._share([other for other in self.flows if other is not flow])
                flow.ended()

        self.clock.after(ceil(flow.left / flow.speed), finish)


def contended(groups: Sequence[tuple[Sequence[int], Mapping[str, Fraction]]]) -> list[Usage]:
    """For groups of ranks and what each takes of its members' links: what those use that can contend, nothing for the others.

    Groups contend when all that use some member's link, at full speed, need more of it than there is.
    """
    usages: list[dict[Hashable, Fraction]] = [
        {(rank, link): part for link, part in parts.items() for rank in ranks} for ranks, parts in groups
    ]
    users: dict[Hashable, list[int]] = {}
    for index, usage in enumerate(usages):
        for link in usage:
            users.setdefault(link, []).append(index)
    full = [indices for link, indices in users.items() if len(indices) > 1 and sum(usages[index][link] for index in indices) > 1]
    competing = {index for indices in full for index in indices}
    return [usage if index in competing else {} for index, usage in enumerate(usages)]
