"""Resharding: the elements that each rank reads from each file of a checkpoint of other ranks.

A pure function of two cuts of the same parameters (`pieces`), whatever their layouts. Padding is
never read. torch DCP reads its pieces whole, of which it then takes the part that it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from zsim.analysis.checkpoints.pieces import Files
from zsim.errors import ZsimError
from zsim.ir.sharding import Interval, Piece


class CheckpointError(ZsimError):
    """A checkpoint that cannot be written, or from which ranks cannot load what they hold."""


class CheckpointMemoryError(CheckpointError):
    """A save or a load for which a device or a host has no room."""

    exit_code = 1


class CheckpointFolderError(CheckpointError):
    """A folder that is no whole checkpoint of the scenario."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Read:
    """The elements `interval` of `parameter`, at element `source` of `file` and `destination` of
    what `rank` holds; `stored` elements lie there in one piece."""

    rank: int
    file: int
    parameter: int
    interval: Interval
    source: int
    destination: int
    stored: int


def reads(saved: Files, wanted: Files) -> tuple[Read, ...]:
    """The reads that give each rank the pieces that it `wanted`, in its order, from files `saved`.

    CheckpointError names the first elements that are in no file.

    >>> from zsim.analysis.checkpoints.pieces import by_rows
    >>> [(r.rank, r.file, r.interval.numel) for r in reads(by_rows([(4,)], 2), by_rows([(4,)], 3))]
    [(0, 0, 2), (1, 1, 2)]
    """
    stored = _stored(saved)
    return tuple(
        read
        for rank, pieces in enumerate(wanted)
        for piece in pieces
        for read in _of_piece(rank, piece, stored.get(piece.parameter, []))
    )


def _stored(saved: Files) -> dict[int, list[tuple[int, int, Piece]]]:
    """The first element, the file and the piece of all stored pieces of a parameter, in element
    order."""
    stored: dict[int, list[tuple[int, int, Piece]]] = {}
    for file, pieces in enumerate(saved):
        for piece in pieces:
            entry = (piece.interval.start, file, piece)
            stored.setdefault(piece.parameter, []).append(entry)
    for entries in stored.values():
        entries.sort(key=lambda entry: entry[:2])
    return stored


def _of_piece(rank: int, piece: Piece, stored: list[tuple[int, int, Piece]]) -> Iterator[Read]:
    position, wanted = piece.interval.start, piece.interval
    at = max(0, bisect_right(stored, position, key=lambda entry: entry[0]) - 1)
    while position < wanted.stop:
        if at == len(stored) or not stored[at][0] <= position < stored[at][2].interval.stop:
            raise CheckpointError(
                where=f"rank {rank}, parameter {piece.parameter}",
                expected=f"elements {position:,} to {wanted.stop:,} in some file",
                found="no file that has them",
            )
        start, file, source = stored[at]
        stop = min(wanted.stop, source.interval.stop)
        yield Read(
            rank, file, piece.parameter, Interval(position, stop),
            source.offset + position - start, piece.offset + position - wanted.start,
            source.interval.numel,
        )
        position, at = stop, at + 1
