"""A collective that is no ring's: it runs as a whole once all members are there, in the time that
its closed form gives."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from zsim.engine.ring_steps.part import MemberPart, PartProcess

RunAlone = Callable[[int, Callable[[], None]], None]
"""Runs something that takes so many ns alone on its links, and calls back at its end."""


class WholeCollective:
    """A tree, NVLS or another algorithm that has no steps here."""

    def __init__(
        self, environment: simpy.Environment, *, size: int, alone_ns: int, run: RunAlone
    ) -> None:
        """`run` shares links with other wholes; `size` is the number of members."""
        self.environment, self.alone_ns, self.run = environment, alone_ns, run
        self.missing, self.longer_ns = size, 0
        self.over = environment.event()
        self.begin_ns = 0

    def take_part(self, part: MemberPart) -> PartProcess:
        """Process of a member's part: the last to come starts the collective."""
        self.missing -= 1
        self.longer_ns = max(self.longer_ns, part.longer_ns)
        if not self.missing:
            self.alone_ns += self.longer_ns
            self.begin_ns = int(self.environment.now)
            self.run(self.alone_ns, self._end)
        yield self.over
        return self.begin_ns, int(self.environment.now) - self.begin_ns - self.alone_ns

    def _end(self) -> None:
        self.over.succeed()
