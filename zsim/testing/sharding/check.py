"""`check_sharding`: laws of shard math on a user's own functions, and the smallest breach."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, TypeVar

from zsim.errors import ArgumentError, ZsimError
from zsim.testing.sharding.laws import LAWS, Law, ShardCase
from zsim.testing.sharding.values import Cut, Make

WORLDS = (1, 2, 3, 4, 5, 7, 8, 16)
"""World sizes by default: one rank, powers of two, primes."""
ROWS = (0, 1, 2, 3, 5, 7, 8, 13, 16, 31)
"""First dimensions by default: none, fewer than ranks, primes, multiples."""
SHAPES: tuple[tuple[int, ...], ...] = tuple(
    sorted(
        [*((rows,) for rows in ROWS), *((rows, columns) for rows in ROWS for columns in (1, 3)),
         (2, 3, 2), (5, 2, 2)],
        key=lambda shape: (prod(shape), len(shape), shape),
    )
)
F = TypeVar("F", bound=Callable[..., Any])


class ShardLawError(ZsimError, AssertionError):
    """A law of shard math that functions break: the law, the smallest shape, the ranks."""


def check_sharding(
    shard: Callable[[Any, int, int], Any],
    unshard: Callable[..., Any],
    reshard: Callable[[list[Any], int], Any] | None = None,
    *,
    make: Make = list,
    gives_shape: bool = False,
    worlds: Sequence[int] = WORLDS,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    without: Collection[str] = (),
) -> int:
    """The number of cases of `shapes` and `worlds` in which all laws hold; ShardLawError at the
    first that does not.

    `shard(tensor, rank, world)` gives a rank's piece, `unshard(pieces)` the tensor; with
    `gives_shape` it is `unshard(pieces, shape)`. `reshard(pieces, world)` gives the pieces for
    another world. `make` makes a tensor of nested lists, as torch.tensor. `without`: names of
    `LAWS` that do not hold by intent. Cases go from small to large, so the first failure is the
    smallest.

    >>> def rows(tensor, rank, world):
    ...     size = -(-len(tensor) // world)
    ...     return tensor[rank * size : (rank + 1) * size]
    >>> check_sharding(rows, lambda pieces: [row for piece in pieces for row in piece])
    256
    >>> def floor(tensor, rank, world):
    ...     size = len(tensor) // world
    ...     return tensor[rank * size : (rank + 1) * size]
    >>> check_sharding(floor, lambda pieces: [row for piece in pieces for row in piece])
    Traceback (most recent call last):
    zsim.testing.sharding.check.ShardLawError: elements_are_held_once: expected it to hold, found \
shape 1 over 2 ranks: 1 of 1 elements are in no piece, as that at index 0
    """
    unknown = [name for name in without if name not in LAWS]
    if unknown:
        raise ArgumentError(where="without", expected=", ".join(LAWS), found=repr(unknown[0]))
    cut = Cut(shard, unshard, reshard, make, gives_shape)
    laws = {name: law for name, law in LAWS.items() if name not in without}
    number = 0
    for number, case in enumerate(_cases(worlds, shapes), 1):  # noqa: B007
        _require(cut, case, laws)
    return number


def _cases(worlds: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Iterator[ShardCase]:
    for shape, (index, world) in product(shapes, enumerate(worlds)):
        yield ShardCase(shape, world, worlds[(index + 1) % len(worlds)])


def _require(cut: Cut, case: ShardCase, laws: dict[str, Law]) -> None:
    for name, law in laws.items():
        try:
            breach = next(law(cut, case), None)
        except Exception as error:
            error.add_note(f"in the law {name}, {case}")
            raise
        if breach:
            raise ShardLawError(where=name, expected="it to hold", found=f"{case}: {breach}")
