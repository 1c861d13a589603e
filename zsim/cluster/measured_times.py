"""Times of collectives as they were measured on one machine, size by size.

A machine whose ranks share cores has no closed form: the operating system's scheduler decides as
much as any link. So its times are kept as points.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Times of one `collective` over `ranks` ranks: `points` are (bytes of the full message,
    nanoseconds), by bytes. Nine of ten measurements are expected within the share `width`."""

    collective: str
    ranks: int
    points: tuple[tuple[int, int], ...]
    width: float
    source: str
    nodes: int = 1
    """Nodes that the ranks are on."""

    def ns(self, nbytes: int) -> int:
        """Nanoseconds of a message: on the line between its neighbours, that of the smallest size
        below it, and on the last line beyond the largest.

        >>> times = MeasuredTimes(
        ...     collective="all_gather", ranks=2, points=((1000, 50), (3000, 90)), width=0.2,
        ...     source="",
        ... )
        >>> times.ns(10), times.ns(2000), times.ns(5000)
        (50, 70, 130)
        """
        first, *_ = self.points
        if nbytes <= first[0] or len(self.points) == 1:
            return first[1]
        index = min(bisect_right(self.points, (nbytes, 0)), len(self.points) - 1)
        (left, before), (right, after) = self.points[index - 1], self.points[index]
        return max(1, before + (after - before) * (nbytes - left) // (right - left))


def times_of(
    times: tuple[MeasuredTimes, ...], collective: str, ranks: int, *, nodes: int = 1
) -> MeasuredTimes | None:
    """The times of `collective` over `ranks` ranks on `nodes` nodes; None if none were measured."""
    key = (collective, ranks, nodes)
    return next(
        (each for each in times if (each.collective, each.ranks, each.nodes) == key), None
    )
