"""A rank's part in a collective, and the queue of a communicator in which its parts take turns."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import simpy

Lost = tuple[int, int]
"""Start of a rank's part, and the ns that it lost to shared links."""
Process = Generator[simpy.Event, Any, None]
PartProcess = Generator[simpy.Event, Any, Lost]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPart:
    """A rank's part in a collective.

    It has the rank's position in the group, when it is ready, and how much longer it takes than
    alone. At its end `over` is called with start, end and ns lost to shared
    links.
    """

    name: str
    position: int
    ready_ns: int
    longer_ns: int
    over: Callable[[int, int, int], None]


class CollectiveAtWork(Protocol):
    """A collective in one simulation, of which every member has a part."""

    def take_part(self, part: MemberPart) -> PartProcess:
        """Process of a member's part from its coming on."""
        ...


class MemberQueues:
    """The queues of a communicator's members: each takes part in one collective after another, in
    the order of issue."""

    def __init__(self, environment: simpy.Environment) -> None:
        self.environment = environment
        self.collectives: dict[int, CollectiveAtWork] = {}
        self.ends: dict[tuple[int, int], simpy.Event] = {}
        """Events of ends of parts, by the collective's number and the member's position."""

    def enter(self, number: int, part: MemberPart, make: Callable[[], CollectiveAtWork]) -> None:
        """Let a member take part in the collective of that `number`, made at its first member's."""
        if number not in self.collectives:
            self.collectives[number] = make()
        self.environment.process(self._in_turn(number, part, self.collectives[number]))

    def _in_turn(self, number: int, part: MemberPart, collective: CollectiveAtWork) -> Process:
        environment = self.environment
        if number:
            yield self._end(number - 1, part.position)
        if part.ready_ns > environment.now:
            yield environment.timeout(part.ready_ns - environment.now)
        start, lost = yield from collective.take_part(part)
        self._end(number, part.position).succeed()
        part.over(start, int(environment.now), lost)

    def _end(self, number: int, position: int) -> simpy.Event:
        key = number, position
        if key not in self.ends:
            self.ends[key] = self.environment.event()
        return self.ends[key]
