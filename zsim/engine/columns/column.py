"""Columns: the ns of an op on many ranks, and their sums and maxima."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

Column = int | list[int]
"""Nanoseconds by rank, or of all ranks at once."""


def plus(column: Column, other: Column) -> Column:
    """The sum of both, rank by rank."""
    if isinstance(column, int):
        if isinstance(other, int):
            return column + other
        column, other = other, column
    if isinstance(other, int):
        return [ns + other for ns in column] if other else column
    return [*map(add, column, other)]


def later(column: Column, other: Column) -> Column:
    """The later of both, rank by rank."""
    if isinstance(column, int):
        if isinstance(other, int):
            return max(column, other)
        column, other = other, column
    if isinstance(other, int):
        return [at if at > other else other for at in column]
    return [at if at > by else by for at, by in zip(column, other, strict=True)]


def apart(column: Column, other: Column) -> Column:
    """The distance of both, rank by rank."""
    if isinstance(column, int):
        if isinstance(other, int):
            return abs(column - other)
        column, other = other, column
    if isinstance(other, int):
        return [abs(ns - other) for ns in column]
    return [abs(ns - than) for ns, than in zip(column, other, strict=True)]


def most(column: Column) -> int:
    """The most on any rank."""
    return column if isinstance(column, int) else max(column)


def least(column: Column) -> int:
    """The least on any rank."""
    return column if isinstance(column, int) else min(column)


def listed(column: Column, size: int) -> list[int]:
    """The column as so many numbers."""
    return [column] * size if isinstance(column, int) else column


def row(columns: Sequence[Column], position: int) -> list[int]:
    """The ns of each column at the rank in that position."""
    return [column if isinstance(column, int) else column[position] for column in columns]


def folded(column: Column) -> Column:
    """The column, as one number where all ranks have the same."""
    if isinstance(column, int) or column.count(column[0]) < len(column):
        return column
    return column[0]
