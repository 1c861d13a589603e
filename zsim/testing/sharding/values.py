"""Values that a user's shard functions are given, and what is read back from their pieces.

Elements are distinct numbers, so that each one can be found again. The kit knows no tensor library:
`make` makes a tensor of nested lists, and pieces are read by their own `tolist`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

__tracebackhide__ = True  # reports of pytest end at the user's own line
Make = Callable[..., Any]
"""Makes a tensor of nested lists, as torch.tensor or numpy.array; `list` keeps the lists."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The user's functions: `shard(tensor, rank, world)`, `unshard(pieces)` and, if there is one,
    `reshard(pieces, world)`."""

    shard: Callable[[Any, int, int], Any]
    unshard: Callable[..., Any]
    reshard: Callable[[list[Any], int], Any] | None = None
    make: Make = list
    gives_shape: bool = False
    """True where `unshard` wants the whole shape too."""
    dtype: Any = None
    """The dtype that `make` is told; None for its own choice."""

    def piece(self, tensor: Any, rank: int, world: int) -> Any:
        """A rank's piece."""
        with _called(f"shard(tensor, rank={rank}, world={world})"):
            return self.shard(tensor, rank, world)

    def pieces(self, tensor: Any, world: int) -> list[Any]:
        """Every rank's piece."""
        return [self.piece(tensor, rank, world) for rank in range(world)]

    def moved(self, pieces: list[Any], world: int) -> list[Any]:
        """The pieces for another world, of functions with `reshard`."""
        assert self.reshard is not None
        with _called(f"reshard(pieces of {len(pieces)} ranks, world={world})"):
            return list(self.reshard(pieces, world))

    def joined(self, pieces: list[Any], tensor: Any) -> Any:
        """The tensor of all pieces of `tensor`, of which `unshard` may get the shape."""
        shape = (shape_of(tensor),) if self.gives_shape else ()
        with _called(f"unshard(pieces of {len(pieces)} ranks{', shape' if shape else ''})"):
            return self.unshard(pieces, *shape)

    def tensor(self, shape: Sequence[int], *, first: int = 1) -> Any:
        """A tensor of that shape whose elements are `first`, `first` + 1, …"""
        return self.made(shape, iter(range(first, first + prod(shape))))

    def made(self, shape: Sequence[int], numbers: Iterator[Any]) -> Any:
        """A tensor of that shape, filled in order; nested lists say no shape where none is in
        them."""
        lists = nested(shape, numbers)
        made = self.make(lists) if self.dtype is None else self.make(lists, dtype=self.dtype)
        return made.reshape(tuple(shape)) if hasattr(made, "reshape") else made

    def holds(self, *numbers: float) -> bool:
        """True where the dtype holds these numbers exactly."""
        try:
            with warnings.catch_warnings(action="ignore"):  # numpy's, of an overflow
                made, plain = self.made((len(numbers),), iter(numbers)), self.tensor((1,))
            same = getattr(made, "dtype", None) == getattr(plain, "dtype", None)
            return same and elements(made) == list(numbers)
        except (OverflowError, RuntimeError, TypeError, ValueError):  # by the library
            return False

    def exacting(self, number: int) -> list[Any]:
        """So many values of the dtype that each narrower one changes: no zero and no NaN, so that
        equal ones have equal bits."""
        bits, top = _finest(self.make, self.dtype)
        if not bits:
            return [top - 2 * (index % (top // 2 + 1)) for index in range(number)]
        pairs = [divmod(index, 2 ** (bits - 1)) for index in range(number)]
        return [
            (1 + (2 * odd + 1) * 2.0**-bits) * 2.0 ** (top - down % (top + 1))
            for down, odd in pairs
        ]


@contextmanager
def _called(call: str) -> Iterator[None]:
    """Notes the call on whatever the user's function raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {call}")
        raise


FRACTIONS = (52, 23, 10, 7, 3, 2)
"""Bits of fractions: float64, float32, float16, bfloat16 and two of 8 bits."""
EXPONENTS = (1000, 100, 15, 7)
"""Exponents that are too large for the next narrower float."""
INTEGERS = (64, 63, 32, 31, 16, 15, 8, 7)


@lru_cache(maxsize=64)
def _finest(make: Make, dtype: Any) -> tuple[int, int]:
    """Bits of the fraction of a dtype and a large exponent; 0 and the largest one for integers."""
    cut = Cut(lambda tensor, rank, world: tensor, list, make=make, dtype=dtype)
    bits = next((bits for bits in FRACTIONS if cut.holds(1 + 2.0**-bits)), 0)
    if bits:
        largest = 2 - 2.0**-bits
        return bits, next((top for top in EXPONENTS if cut.holds(largest * 2.0**top)), 0)
    return 0, next((2**size - 1 for size in INTEGERS if cut.holds(2**size - 1)), 1)


def nested(shape: Sequence[int], numbers: Iterator[Any]) -> Any:
    """Lists in lists of that shape, filled in order; a number for a scalar."""
    if not shape:
        return next(numbers)
    if len(shape) == 1:
        return [next(numbers) for _ in range(shape[0])]
    return [nested(shape[1:], numbers) for _ in range(shape[0])]


def elements(piece: Any) -> list[Any]:
    """The elements of a piece in order; a piece of None is an empty one."""
    if piece is None:
        return []
    if isinstance(piece, range):
        return list(piece)
    rows = piece.tolist() if hasattr(piece, "tolist") else piece
    return list(_flat(rows)) if isinstance(rows, list | tuple) else [rows]


def _flat(rows: Sequence[Any]) -> Iterator[Any]:
    for row in rows:
        if isinstance(row, list | tuple):
            yield from _flat(row)
        else:
            yield row


def shape_of(tensor: Any) -> tuple[int, ...] | None:
    """The shape, of nested lists too; None where there is none."""
    if hasattr(tensor, "shape"):
        return tuple(int(size) for size in tensor.shape)
    if not isinstance(tensor, list | tuple):
        return None
    inner = shape_of(tensor[0]) if tensor else ()
    return (len(tensor), *(inner or ()))


def poisoned(cut: Cut, piece: Any, padding: Sequence[int]) -> Any:
    """The piece with -1 at the positions `padding` of its elements."""
    if hasattr(piece, "clone"):  # torch's
        flat = piece.clone().reshape(-1)
        flat[list(padding)] = -1
        return flat.reshape(piece.shape)
    numbers = [-1 if i in set(padding) else value for i, value in enumerate(elements(piece))]
    shape = shape_of(piece)
    return cut.made((len(numbers),) if shape is None else shape, iter(numbers))
