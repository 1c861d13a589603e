"""A device that notes the order which streams and events guarantee, as `torch.cuda` names them.

Each stream and event knows, by vector clock, the work that has ended whenever it has come so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Clock = dict[int, int]
"""Number of pieces of work that have ended, by the number of their stream."""


def later(clock: Clock, other: Clock) -> Clock:
    """Union of two clocks: the later count of each stream."""
    return {key: max(clock.get(key, 0), other.get(key, 0)) for key in {*clock, *other}}


@dataclass(eq=False)
class LoggedStream:
    """Work one after another."""

    number: int
    clock: Clock = field(default_factory=dict)

    def wait_event(self, event: LoggedEvent) -> None:
        self.clock = later(self.clock, event.clock)

    def wait_stream(self, stream: LoggedStream) -> None:
        self.clock = later(self.clock, stream.clock)

    def work(self) -> tuple[int, int, Clock]:
        """One piece of work: its stream, its number there, and what has ended when it begins."""
        before = self.clock
        count = before.get(self.number, 0) + 1
        self.clock = {**before, self.number: count}
        return self.number, count, before


@dataclass(eq=False)
class LoggedEvent:
    """A place in a stream."""

    clock: Clock = field(default_factory=dict)

    def record(self, stream: LoggedStream) -> None:
        self.clock = stream.clock


class LoggedDevice:
    """Streams and events, as the module of a device has them."""

    Event = LoggedEvent

    def __init__(self) -> None:
        self.streams = [LoggedStream(0)]
        self._current = self.streams[0]

    def Stream(self, priority: int = 0) -> LoggedStream:
        """Another stream."""
        self.streams.append(LoggedStream(len(self.streams)))
        return self.streams[-1]

    def current_stream(self) -> LoggedStream:
        """The stream of what is issued now."""
        return self._current

    @contextmanager
    def stream(self, stream: LoggedStream) -> Iterator[None]:
        """Inside, `stream` is the current one."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
