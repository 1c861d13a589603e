"""Shard math: the elements that each rank holds. Pure functions on integers, used by every strategy
and by the executor.

Two layouts. FSDP2 cuts each parameter along dim 0 by the rule of `torch.chunk`; ZeRO concatenates a
param group into one flat buffer and cuts that. Both pad to equal shards, and a shard can be empty.
Nothing here knows bytes or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod


@dataclass(frozen=True, slots=True)
class Interval:
    """The elements `start` to `stop`, without `stop`."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def intersect(self, other: Interval) -> Interval:
        """The elements that both hold; an empty interval when there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


def shard_size(n: int, num_shards: int) -> int:
    """ceil(n / num_shards): the elements of a full shard, as in `torch.chunk`.

    >>> shard_size(10, 4), padded_size(10, 4)
    (3, 12)
    """
    return -(-n // num_shards)


def padded_size(n: int, num_shards: int) -> int:
    """`n` padded so that `num_shards` shards of equal size hold it."""
    return shard_size(n, num_shards) * num_shards


def num_filled(n: int, num_shards: int) -> int:
    """Ranks whose shard of `n` is not empty: the first ones.

    >>> num_filled(3, 8), num_filled(9, 8), num_filled(8, 8)
    (3, 5, 8)
    """
    return -(-n // shard_size(n, num_shards)) if n else 0


def shard(n: int, *, num_shards: int, rank: int) -> Interval:
    """The elements of `n` that `rank` holds: [min(r·s, n), min((r+1)·s, n)) with
    s = ceil(n / num_shards). Can be empty.

    >>> [shard(5, num_shards=4, rank=rank).numel for rank in range(4)]
    [2, 2, 1, 0]
    """
    size = shard_size(n, num_shards)
    return Interval(min(rank * size, n), min((rank + 1) * size, n))


def shards(n: int, num_shards: int) -> tuple[Interval, ...]:
    """Every rank's shard; together they hold each of the `n` elements once."""
    return tuple(shard(n, num_shards=num_shards, rank=rank) for rank in range(num_shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim0Layout:
    """One parameter cut along dim 0 (FSDP2): each rank stores ceil(rows / num_shards) rows, padded.

    >>> layout = Dim0Layout(shape=(5, 3), num_shards=2)
    >>> layout.shard_numel, layout.padded_numel
    (9, 18)
    >>> [layout.local_numel(rank) for rank in range(2)]
    [9, 6]
    """

    shape: tuple[int, ...]
    num_shards: int

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return prod(self.shape[1:])

    @property
    def shard_numel(self) -> int:
        """Elements that every rank stores, padding included."""
        return shard_size(self.shape[0], self.num_shards) * self.row_numel

    @property
    def padded_numel(self) -> int:
        """Elements of the gathered parameter, padding included."""
        return self.shard_numel * self.num_shards

    def local_rows(self, rank: int) -> Interval:
        """The rows of the parameter, without padding, that `rank` holds."""
        return shard(self.shape[0], num_shards=self.num_shards, rank=rank)

    def local_numel(self, rank: int) -> int:
        """Elements of the parameter, without padding, that `rank` holds."""
        return self.local_rows(rank).numel * self.row_numel


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements `interval` of the flattened parameter number `parameter`, at `offset` of the
    rank's shard."""

    parameter: int
    interval: Interval
    offset: int


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Parameters of `numels` elements concatenated, padded at the end to `num_shards` and cut
    (ZeRO).

    >>> layout = FlatLayout(numels=(6, 3), num_shards=2)
    >>> layout.shard_numel, layout.padded_numel
    (5, 10)
    >>> [(piece.parameter, piece.interval.numel) for piece in layout.pieces(1)]
    [(0, 1), (1, 3)]
    """

    numels: tuple[int, ...]
    num_shards: int

    @cached_property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(self.numels)

    @cached_property
    def shard_numel(self) -> int:
        """Elements that every rank stores, padding included."""
        return shard_size(self.numel, self.num_shards)

    @property
    def padded_numel(self) -> int:
        """Elements of the gathered buffer, padding included."""
        return self.shard_numel * self.num_shards

    def local(self, rank: int) -> Interval:
        """The elements of the flat buffer, without padding, that `rank` holds."""
        return shard(self.numel, num_shards=self.num_shards, rank=rank)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The piece of each parameter that `rank` holds, in order; empty pieces are left out."""
        local = self.local(rank)
        bounds = pairwise(accumulate(self.numels, initial=0))
        cuts = (
            (index, start, local.intersect(Interval(start, stop)))
            for index, (start, stop) in enumerate(bounds)
        )
        return tuple(
            Piece(index, Interval(cut.start - start, cut.stop - start), cut.start - local.start)
            for index, start, cut in cuts
            if cut.numel
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements that go from rank `source` to rank `destination` when the number of shards changes;
    both may be one rank."""

    source: int
    destination: int
    interval: Interval


def reshard(n: int, *, old: int, new: int) -> tuple[Transfer, ...]:
    """The transfers that turn `old` shards of `n` elements into `new` ones, in element order; each
    element moves once.

    >>> [(t.source, t.destination, t.interval.numel) for t in reshard(4, old=1, new=2)]
    [(0, 0, 2), (0, 1, 2)]
    """
    transfers, position = [], 0
    while position < n:
        source, destination = position // shard_size(n, old), position // shard_size(n, new)
        stop = min(
            shard(n, num_shards=old, rank=source).stop,
            shard(n, num_shards=new, rank=destination).stop,
        )
        transfers.append(Transfer(source, destination, Interval(position, stop)))
        position = stop
    return tuple(transfers)


def greedy_owners(numels: Sequence[int], *, num_ranks: int) -> tuple[int, ...]:
    """The rank that owns each parameter under torch's ZeroRedundancyOptimizer, by parameter.

    >>> greedy_owners((4, 3, 3), num_ranks=2)
    (0, 1, 1)

    Largest first (equal ones in their order), each to the rank with the fewest elements so far, the
    lowest rank on a tie. Source: torch/distributed/optim/zero_redundancy_optimizer.py,
    `_partition_parameters`.
    """
    totals = [0] * num_ranks
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += numels[index]
    return tuple(owners)
