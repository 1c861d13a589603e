"""The pieces of parameters that lie in each file of a checkpoint, in elements.

Each layout cuts the same parameters for any number of ranks, so that `reshard` can compare two
cuts. Nothing here knows bytes, dtypes or formats of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod

from zsim.ir.sharding import Dim0Layout, Interval, Piece, shard_size

Files = tuple[tuple[Piece, ...], ...]
"""The pieces of each rank's file, in the order in which they lie there."""


def by_rows(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Files:
    """Parameters cut along dim 0, as torch DCP stores those of fully_shard: no padding is stored.

    >>> [[piece.interval for piece in file] for file in by_rows([(3, 2)], 2)]
    [[Interval(start=0, stop=4)], [Interval(start=4, stop=6)]]
    """
    layouts = [Dim0Layout(shape=shape, num_shards=num_ranks) for shape in shapes]
    files = []
    for rank in range(num_ranks):
        cuts = (
            (index, layout.local_rows(rank), layout.row_numel)
            for index, layout in enumerate(layouts)
        )
        files.append(_packed(
            (index, Interval(rows.start * numel, rows.stop * numel)) for index, rows, numel in cuts
        ))
    return tuple(files)


def flat(buffers: Sequence[Sequence[int]], num_ranks: int, *, alignment: int = 1) -> Files:
    """Buffers of consecutive parameters, by their elements, each padded at its end and cut into
    equal shards. A file has its shard of each buffer, padding included.

    With `alignment` a buffer is padded to a multiple of that many elements for each rank: DeepSpeed
    stages 1 and 2 have 2. Its stage 3 has a buffer for each parameter.

    >>> [[piece.interval.numel for piece in file] for file in flat([[3, 4]], 2, alignment=2)]
    [[3, 1], [3]]
    """
    files: list[list[Piece]] = [[] for _ in range(num_ranks)]
    first = begin = 0
    for numels in buffers:
        size = shard_size(sum(numels), num_ranks * alignment) * alignment
        for index, (start, stop) in enumerate(pairwise(accumulate(numels, initial=0)), first):
            for rank in range(start // size if size else 0, -(-stop // size) if size else 0):
                cut = Interval(start, stop).intersect(Interval(rank * size, (rank + 1) * size))
                if cut.numel:
                    inside = Interval(cut.start - start, cut.stop - start)
                    files[rank].append(Piece(index, inside, begin + cut.start - rank * size))
        first, begin = first + len(numels), begin + size
    return tuple(map(tuple, files))


def whole(numels: Sequence[int], owners: Sequence[int], num_ranks: int) -> Files:
    """Whole parameters, each in the file of its owner.

    >>> [len(file) for file in whole((4, 4, 2), (0, 0, 1), 2)]
    [2, 1]
    """
    return tuple(
        _packed(
            (index, Interval(0, numel))
            for index, (numel, owner) in enumerate(zip(numels, owners, strict=True))
            if owner == rank
        )
        for rank in range(num_ranks)
    )


def everywhere(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> Files:
    """Whole parameters on every rank, as DDP and ZeRO-1 load them."""
    numels = [prod(shape) for shape in shapes]
    return whole(numels, [0] * len(numels), 1) * num_ranks


def _packed(cuts: Iterable[tuple[int, Interval]]) -> tuple[Piece, ...]:
    """Pieces of a file one behind the other; empty ones are left out."""
    pieces, offset = [], 0
    for index, interval in cuts:
        if interval.numel:
            pieces.append(Piece(index, interval, offset))
            offset += interval.numel
    return tuple(pieces)
