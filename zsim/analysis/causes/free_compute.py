"""The compute under which a communicator's collectives could have run: each nanosecond hides one of
them.

It knows spans of time and no ops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from zsim.runs.figures.intervals import TimeInterval


class FreeCompute:
    """Spans of `compute`, and those of them that are free: neither `taken` by collectives nor
    handed out. Both lists are in order.

    Callers take in the order of collectives' starts.
    """

    def __init__(self, compute: Sequence[TimeInterval], *, taken: Sequence[TimeInterval]) -> None:
        self.compute = compute
        self.starts = [start for start, _ in compute]
        self.before = [0, *accumulate(end - start for start, end in compute)]
        self.coming = deque(_without(compute, taken))
        self.free: list[TimeInterval] = []

    def work(self, since: int, until: int) -> int:
        """Nanoseconds of compute from `since` to `until`, free or not."""
        return self._up_to(until) - self._up_to(since)

    def _up_to(self, moment: int) -> int:
        index = bisect_right(self.starts, moment) - 1
        return (
            self.before[index] + min(moment, self.compute[index][1]) - self.starts[index]
            if index >= 0
            else 0
        )

    def take(self, since: int, until: int, most: int) -> int:
        """Up to `most` nanoseconds of free compute from `since` to `until`, the last first; they
        are not free any more."""
        while self.coming and self.coming[0][0] < until:
            self.free.append(self.coming.popleft())
        index, left = len(self.free), most
        while index and left and self.free[index - 1][1] > since:
            index -= 1
            begin, end = self.free[index]
            low, high = max(begin, since), min(end, until)
            if low < high:
                part = min(left, high - low)
                self.free[index : index + 1] = [
                    span for span in ((begin, high - part), (high, end)) if span[0] < span[1]
                ]
                left -= part
        return most - left


def _without(
    spans: Sequence[TimeInterval], others: Sequence[TimeInterval]
) -> Iterator[TimeInterval]:
    """Subtract `others` from `spans`; both are in order and without overlaps."""
    index = 0
    for begin, end in spans:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        at, further = begin, index
        while further < len(others) and others[further][0] < end:
            if others[further][0] > at:
                yield at, others[further][0]
            at, further = max(at, others[further][1]), further + 1
        if at < end:
            yield at, end
