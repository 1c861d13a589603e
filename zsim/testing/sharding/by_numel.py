"""Shard functions that know a number of elements and no tensor, in the form that is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zsim.errors import ArgumentError
from zsim.io.arguments import described

__tracebackhide__ = True  # reports of pytest end at the user's own line
Bounds = Callable[[int, int, int], Any]


def by_numel(bounds: Bounds) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`shard` and `unshard` of flat lists for a function `bounds(numel, rank, world)`.

    It gives (start, stop), or a rank's number of elements after those of earlier ranks. An end
    past `numel` is padding, which no rank holds.

    >>> from zsim.testing import check_sharding
    >>> def even(numel, rank, world):
    ...     size = -(-numel // world)
    ...     return rank * size, (rank + 1) * size
    >>> check_sharding(*by_numel(even), shapes=[(0,), (5,)])
    16
    """

    def shard(tensor: list[Any], rank: int, world: int) -> list[Any]:
        start, stop = _interval(bounds, len(tensor), rank, world)
        return tensor[start:stop]

    return shard, lambda pieces: [value for piece in pieces for value in piece]


def _interval(bounds: Bounds, numel: int, rank: int, world: int) -> tuple[int, int]:
    answer = bounds(numel, rank, world)
    if _is_size(answer):
        start = sum(bounds(numel, before, world) for before in range(rank))
        return start, start + answer
    if isinstance(answer, tuple | list) and len(answer) == 2 and all(map(_is_size, answer)):
        return answer[0], answer[1]
    raise ArgumentError(
        where=f"by_numel: bounds(numel={numel}, rank={rank}, world={world})",
        expected="(start, stop) or a number of elements, from 0", found=described(answer),
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
