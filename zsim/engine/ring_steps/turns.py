"""A link that several rings want, in one simulation: chunks take turns on it, slice by slice.

simpy's own Resource has three events for each turn, and there are millions of turns. Between two
requests their order is known, so here turns are counted by arithmetic. Only the end of a chunk is
an event.
"""

from __future__ import annotations

from collections.abc import Callable

import simpy


class Passage:
    """A chunk's way over a link, for which it holds it `hold_ns` in all, in so many `slices`."""

    __slots__ = ("hold_ns", "left", "over", "slices")

    def __init__(self, hold_ns: int, slices: int, over: Callable[[], None]) -> None:
        self.hold_ns, self.slices, self.over = hold_ns, slices, over
        self.left = slices
        """Turns that it has not had."""

    def ns(self, turns: int) -> int:
        """The time of its next `turns`; those of all slices sum to `hold_ns`."""
        hold_ns, slices, before = self.hold_ns, self.slices, self.slices - self.left
        return hold_ns * (before + turns) // slices - hold_ns * before // slices


class LinkInTurns:
    """A resource of one place, which chunks hold in turn for a slice each, in the order of their
    requests.

    Of two chunks of 100 ns, the second requests the link when the first's second slice has begun.

    >>> environment = simpy.Environment()
    >>> link, ends = LinkInTurns(environment), []
    >>> def chunk(begin, slices):
    ...     yield environment.timeout(begin)
    ...     link.carry(100, slices, lambda: ends.append((begin, environment.now)))
    >>> _ = environment.process(chunk(0, 4)), environment.process(chunk(30, 2))
    >>> environment.run()
    >>> ends  # turns of 25, 25, 50, 25, 50, 25 ns
    [(30, 175), (0, 200)]
    """

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment
        self._queue: list[Passage] = []
        """Chunks in the order of their turns; the first one's has begun."""
        self._begun_ns = 0
        """Start of the present turn."""
        self._due_ns = -1
        """Time of the next end of a chunk, for which there is an event."""

    def carry(self, hold_ns: int, slices: int, over: Callable[[], None]) -> None:
        """Request the link for a chunk now; call `over` at its end."""
        passage = Passage(hold_ns, slices, over)
        now = int(self._environment.now)
        if self._queue:
            self._turn_until(now)
            self._queue.append(passage)
            self._await_first()
        else:
            self._begun_ns = now
            self._queue.append(passage)
            self._await(now + hold_ns)

    def _turn_until(self, now: int) -> None:
        """Count the turns that are over, before any chunk is: whole rounds at once, then the rest.
        """
        queue = self._queue
        fewest = min(passage.left for passage in queue) - 1
        round_ns = sum(passage.hold_ns / passage.slices for passage in queue)
        # a chunk's turns differ from equal ones by less than 1 ns
        rounds = min(fewest, int((now - self._begun_ns - len(queue)) / round_ns)) if round_ns else 0
        if rounds > 0:
            self._begun_ns += sum(passage.ns(rounds) for passage in queue)
            for passage in queue:
                passage.left -= rounds
        while queue[0].left > 1 and (end := self._begun_ns + queue[0].ns(1)) <= now:
            self._begun_ns = end
            first = queue.pop(0)
            first.left -= 1
            queue.append(first)

    def _await_first(self) -> None:
        """See to it that there is an event when the first chunk is over."""
        at = self._first()
        fewest = self._queue[at].left
        end = self._begun_ns + sum(
            passage.ns(fewest - (index > at)) for index, passage in enumerate(self._queue)
        )
        if end != self._due_ns:
            self._await(end)

    def _await(self, end: int) -> None:
        self._due_ns = end
        wait = self._environment.timeout(end - int(self._environment.now))
        wait.callbacks.append(self._end_first)

    def _first(self) -> int:
        """The position of the chunk that is over first: of fewest turns, and of those in front."""
        left = [passage.left for passage in self._queue]
        return left.index(min(left))

    def _end_first(self, _: simpy.Event) -> None:
        """End the first chunk, unless a later request has changed the time of that."""
        if self._due_ns != self._environment.now:
            return
        at = self._first()
        passage, fewest = self._queue[at], self._queue[at].left
        for index, other in enumerate(self._queue):
            if other is not passage:
                other.left -= fewest - (index > at)
        self._queue = [*self._queue[at + 1 :], *self._queue[:at]]
        self._begun_ns, self._due_ns = self._due_ns, -1
        if self._queue:
            self._await_first()
        passage.over()
