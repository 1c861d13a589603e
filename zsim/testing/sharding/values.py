"""Values that a user's shard functions are given, and what is read back from their pieces.

Elements are distinct numbers, so that each one can be found again. The kit knows no tensor library:
`make` makes a tensor of nested lists, and pieces are read by their own `tolist`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

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

    def pieces(self, tensor: Any, world: int) -> list[Any]:
        """Every rank's piece."""
        return [self.shard(tensor, rank, world) for rank in range(world)]

    def joined(self, pieces: list[Any], tensor: Any) -> Any:
        """The tensor of all pieces of `tensor`, of which `unshard` may get the shape."""
        return self.unshard(pieces, shape_of(tensor)) if self.gives_shape else self.unshard(pieces)

    def tensor(self, shape: Sequence[int], *, first: int = 1) -> Any:
        """A tensor of that shape whose elements are `first`, `first` + 1, …"""
        return self.made(shape, iter(range(first, first + prod(shape))))

    def made(self, shape: Sequence[int], numbers: Iterator[Any]) -> Any:
        """A tensor of that shape, filled in order; nested lists say no shape where none is in
        them."""
        lists = nested(shape, numbers)
        made = self.make(lists) if self.dtype is None else self.make(lists, dtype=self.dtype)
        return made.reshape(tuple(shape)) if hasattr(made, "reshape") else made

    def holds(self, number: int) -> bool:
        """True where the dtype holds -1 and each number up to `number` exactly."""
        wanted = [-1, number - 1, number]
        try:
            return elements(self.made((3,), iter(wanted))) == wanted
        except (OverflowError, RuntimeError, TypeError, ValueError):  # by the library
            return False


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
