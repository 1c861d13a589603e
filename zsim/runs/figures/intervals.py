"""Intervals of time in ns: their union, and how long that is."""

from __future__ import annotations

from collections.abc import Iterable

TimeInterval = tuple[int, int]


def union_of(intervals: Iterable[TimeInterval]) -> list[TimeInterval]:
    """Disjoint intervals that cover the same time, in order."""
    merged: list[TimeInterval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length_of(intervals: Iterable[TimeInterval]) -> int:
    """The ns of disjoint intervals."""
    return sum(end - start for start, end in intervals)
