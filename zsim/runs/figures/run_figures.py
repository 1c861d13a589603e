"""Figures of a Run that know their Run, so that a failing test can say why.

Each is the plain number that it was: an int of bytes, of nanoseconds or of collectives, a float.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zsim.errors import ArgumentError, listed
from zsim.io.arguments import described
from zsim.io.quantities import Bytes, Duration
from zsim.io.read_only import ReadOnly
from zsim.ir.ops import COLLECTIVES
from zsim.runs.figures.metrics import Traffic

if TYPE_CHECKING:
    from zsim.runs.run import Run

__tracebackhide__ = True  # reports of pytest end at the user's own line


class PeakMemory(Bytes):
    """The peak memory of a Run, in bytes."""

    run: Run | None = None


class ExposedCommunication(Duration):
    """The exposed communication of a Run, in ns; `fraction` is its share of the step."""

    run: Run | None = None

    @property
    def fraction(self) -> ExposedShare:
        """The largest share of the step, on any rank, in which communication is exposed.

        None of it is exposed in a Duration that is of no Run.
        """
        share = None if self.run is None else self.run.figures.exposed_share
        made = ExposedShare(share or 0.0)
        made.run = self.run
        return made


class ExposedShare(float):
    """A share of a Run's step, between 0 and 1, in which communication is exposed."""

    run: Run | None = None


class CollectiveCount(int):
    """The number of a Run's collectives of one `kind`."""

    run: Run | None = None
    kind: str = ""


RunFigure = PeakMemory | ExposedCommunication | ExposedShare | CollectiveCount


class Collectives(ReadOnly[str, Traffic]):
    """Count and bytes of a rank's collectives, by kind."""

    __slots__ = ("_run",)

    def __init__(self, values: Mapping[str, Traffic], *, run: Run) -> None:
        super().__init__(values)
        self._run = run

    def count(self, kind: str) -> CollectiveCount:
        """The number of collectives of a kind, 0 where there are none.

        ArgumentError for a kind that no Run has.
        """
        if kind not in COLLECTIVES:
            known = sorted(COLLECTIVES)
            near = difflib.get_close_matches(kind, known, n=1) if isinstance(kind, str) else []
            raise ArgumentError(
                where="collectives.count", expected=listed(known),
                found=described(kind), remedy=f"did you mean {near[0]}?" if near else "",
            )
        made = CollectiveCount(self.get(kind, Traffic()).count)
        made.run, made.kind = self._run, kind
        return made
