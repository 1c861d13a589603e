"""Laws of shard math: functions of a user's cut and a case, each of which yields breaches.

A new law is a function and a line in `LAWS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from zsim.testing.sharding.values import Cut, elements, poisoned, shape_of

__tracebackhide__ = True  # reports of pytest end at the user's own line
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardCase:
    """A shape that is cut for `world` ranks, and for `other` ranks where it is resharded."""

    shape: Shape
    world: int
    other: int
    dtype: Any = None

    def __str__(self) -> str:
        sizes = " × ".join(map(str, self.shape))
        shape = f"shape {sizes}" if sizes else "a scalar"
        dtype = "" if self.dtype is None else f" of {getattr(self.dtype, '__name__', self.dtype)}"
        return f"{shape}{dtype} over {self.world} rank{'s' * (self.world > 1)}"


Law = Callable[[Cut, ShardCase], Iterator[str]]


def a_tensor_is_cut_alike_each_time(cut: Cut, case: ShardCase) -> Iterator[str]:
    """One tensor gives equal pieces whenever it is cut, as under both names of a tied one."""
    tensor = cut.tensor(case.shape)
    first, second = (cut.pieces(tensor, case.world) for _ in range(2))
    for rank, (piece, again) in enumerate(zip(first, second, strict=True)):
        if elements(piece) != elements(again):
            yield f"rank {rank} gets {_short(piece)} first and {_short(again)} then"
            return


def elements_are_held_once(cut: Cut, case: ShardCase) -> Iterator[str]:
    """Every element lies in exactly one piece, and pieces hold nothing else but padding."""
    tensor = cut.tensor(case.shape)
    holders: defaultdict[Any, list[int]] = defaultdict(list)
    for rank, piece in enumerate(cut.pieces(tensor, case.world)):
        padding = set(_padding(cut, case, rank))
        for position, value in enumerate(elements(piece)):
            if position not in padding:
                holders[value].append(rank)
    number = prod(case.shape)
    lost = [value for value in range(1, number + 1) if value not in holders]
    if lost:
        yield (
            f"{len(lost)} of {number} elements are in no piece of ranks 0 to {case.world - 1}, as "
            f"that at index {lost[0] - 1}"
        )
    twice = [value for value in range(1, number + 1) if len(holders.get(value, ())) > 1]
    if twice:
        ranks = ", ".join(map(str, holders[twice[0]]))
        yield f"the element at index {twice[0] - 1} is in pieces of ranks {ranks}"
    strange = [value for value in holders if not 1 <= value <= number]
    if strange:
        yield f"rank {holders[strange[0]][0]} holds {strange[0]}, which the tensor does not"


def shards_join_to_the_tensor(cut: Cut, case: ShardCase) -> Iterator[str]:
    """unshard(shard(x)) is x, with its shape."""
    tensor = cut.tensor(case.shape)
    yield from _differs(cut, case, tensor, cut.joined(cut.pieces(tensor, case.world), tensor))


def padding_is_never_read(cut: Cut, case: ShardCase) -> Iterator[str]:
    """unshard gives x whatever stands in the padding."""
    tensor = cut.tensor(case.shape)
    pieces = [
        poisoned(cut, piece, padding) if (padding := _padding(cut, case, rank)) else piece
        for rank, piece in enumerate(cut.pieces(tensor, case.world))
    ]
    yield from _differs(cut, case, tensor, cut.joined(pieces, tensor), "with -1 in its padding ")


def the_tensor_is_left_as_it_was(cut: Cut, case: ShardCase) -> Iterator[str]:
    """shard and unshard change none of their arguments."""
    tensor, pieces = cut.tensor(case.shape), []
    numbers = elements(tensor)
    for rank in range(case.world):
        pieces.append(cut.piece(tensor, rank, case.world))
        if elements(tensor) != numbers:
            yield f"shard changed the tensor for rank {rank}"
            return
    before = [elements(piece) for piece in pieces]
    cut.joined(pieces, tensor)
    if elements(tensor) != numbers:
        yield f"unshard changed the tensor through a piece of ranks 0 to {case.world - 1}"
    changed = [rank for rank, piece in enumerate(pieces) if elements(piece) != before[rank]]
    if changed:
        yield f"unshard changed the piece of rank {changed[0]}"


def pieces_are_equal_or_smaller_later(cut: Cut, case: ShardCase) -> Iterator[str]:
    """No rank holds more elements than one before it, so the first decides memory."""
    sizes = [len(elements(piece)) for piece in cut.pieces(cut.tensor(case.shape), case.world)]
    for rank in range(1, case.world):
        if sizes[rank] > sizes[rank - 1]:
            yield (
                f"rank {rank} holds {sizes[rank]} elements, rank {rank - 1} only {sizes[rank - 1]}"
            )
            return


def dtypes_are_kept(cut: Cut, case: ShardCase) -> Iterator[str]:
    """Pieces and the joined tensor have the tensor's dtype, where it has one."""
    tensor = cut.tensor(case.shape)
    dtype = getattr(tensor, "dtype", None)
    pieces = cut.pieces(tensor, case.world)
    for name, value in (
        *((f"the piece of rank {rank}", piece) for rank, piece in enumerate(pieces)),
        (f"ranks 0 to {case.world - 1} joined", cut.joined(pieces, tensor)),
    ):
        if dtype is not None and getattr(value, "dtype", dtype) != dtype:
            yield f"{name} is of {value.dtype}, the tensor of {dtype}"
            return


def resharding_is_sharding_anew(cut: Cut, case: ShardCase) -> Iterator[str]:
    """reshard(shard(x, n), m) is shard(x, m), and back it is shard(x, n)."""
    if cut.reshard is None:
        return
    tensor = cut.tensor(case.shape)
    pieces = cut.pieces(tensor, case.world)
    moved = cut.moved(pieces, case.other)
    yield from _pieces_differ(
        cut.pieces(tensor, case.other), moved, f"from {case.world} to {case.other} ranks"
    )
    yield from _pieces_differ(
        pieces, cut.moved(moved, case.world),
        f"from {case.world} to {case.other} ranks and back",
    )


def values_are_kept_to_the_bit(cut: Cut, case: ShardCase) -> Iterator[str]:
    """Pieces, and what is made of them, hold the tensor's own values, which each narrower dtype
    changes."""
    values = cut.exacting(prod(case.shape))
    tensor = cut.made(case.shape, iter(values))
    places = [elements(piece) for piece in cut.pieces(cut.tensor(case.shape), case.world)]
    pieces = cut.pieces(tensor, case.world)
    for rank, (indices, piece) in enumerate(zip(places, pieces, strict=True)):
        padding = set(_padding(cut, case, rank))
        for at, (index, value) in enumerate(zip(indices, elements(piece), strict=False)):
            if at not in padding and 1 <= index <= len(values) and value != values[int(index) - 1]:
                yield f"rank {rank} holds {value!r} for the value {values[int(index) - 1]!r}"
                return
    yield from _differs(cut, case, tensor, cut.joined(pieces, tensor))
    if cut.reshard is not None:
        yield from _pieces_differ(
            cut.pieces(tensor, case.other), cut.moved(pieces, case.other),
            f"from {case.world} to {case.other} ranks",
        )


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        a_tensor_is_cut_alike_each_time, elements_are_held_once, shards_join_to_the_tensor,
        padding_is_never_read, the_tensor_is_left_as_it_was, pieces_are_equal_or_smaller_later,
        dtypes_are_kept, resharding_is_sharding_anew, values_are_kept_to_the_bit,
    )
}
"""Every law by its name."""


def _padding(cut: Cut, case: ShardCase, rank: int) -> list[int]:
    """Positions in a piece that hold the same whatever the tensor holds: they are padding."""
    number = prod(case.shape)
    first, second = (
        elements(cut.piece(cut.tensor(case.shape, first=begin), rank, case.world))
        for begin in (1, number + 1)
    )
    return [i for i, (own, other) in enumerate(zip(first, second, strict=False)) if own == other]


def _differs(
    cut: Cut, case: ShardCase, tensor: Any, joined: Any, how: str = ""
) -> Iterator[str]:
    """The first element in which the joined pieces differ from the tensor, with its rank."""
    expected, actual = elements(tensor), elements(joined)
    ranks = f"pieces of ranks 0 to {case.world - 1}"
    if expected != actual:
        at = next(
            (i for i, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(actual)),
        )
        holders = [
            rank for rank, piece in enumerate(cut.pieces(cut.tensor(case.shape), case.world))
            if at + 1 in elements(piece)
        ]
        rank = f", which rank {holders[0]} holds" if holders and at < len(expected) else ""
        yield (
            f"{how}joined {ranks} give {_at(actual, at)} at index {at}, expected "
            f"{_at(expected, at)}{rank}"
        )
    elif shape_of(joined) is not None and shape_of(joined) != shape_of(tensor):
        yield f"{how}joined {ranks} have the shape {shape_of(joined)}, expected {shape_of(tensor)}"


def _at(numbers: list[Any], index: int) -> str:
    return str(numbers[index]) if index < len(numbers) else "nothing"


def _pieces_differ(expected: list[Any], actual: list[Any], how: str) -> Iterator[str]:
    if len(expected) != len(actual):
        yield f"resharded {how} there are {len(actual)} pieces, expected {len(expected)}"
        return
    for rank, (wanted, piece) in enumerate(zip(expected, actual, strict=True)):
        if elements(wanted) != elements(piece):
            yield (
                f"resharded {how} rank {rank} holds {_short(piece)}, expected {_short(wanted)}"
            )
            return


def _short(piece: Any) -> str:
    numbers = elements(piece)
    return f"{numbers[:8]}{' …' if len(numbers) > 8 else ''}"
