"""The clock of one simulation: simpy's event queue, ordered by time and then by insertion."""

from __future__ import annotations

from collections.abc import Callable

import simpy


class SimpyClock:
    """The present in ns, and the calls to come; processes of simpy may run beside them."""

    def __init__(self) -> None:
        self.environment = simpy.Environment()

    def now(self) -> int:
        """The present, in ns."""
        return int(self.environment.now)

    def after(self, delay: int, call: Callable[[], None]) -> None:
        """Call `call` in `delay` nanoseconds."""
        self.environment.timeout(delay).callbacks.append(lambda _: call())

    def run(self) -> None:
        """Make every call and run every process, until none is left."""
        self.environment.run()
