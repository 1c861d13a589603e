"""Pieces of a tensor for checkpoints: rows, as many on each rank as `torch.chunk` gives it."""

from __future__ import annotations

import torch
from torch import Tensor


def piece(tensor: Tensor, rank: int, world: int) -> Tensor:
    """Rows of `rank`; a late one may have fewer, or none."""
    rows = -(-len(tensor) // world)
    return tensor[rank * rows : (rank + 1) * rows]


def whole(pieces: list[Tensor]) -> Tensor:
    """The tensor that these pieces were cut from."""
    return torch.cat(pieces)


def pieces_for(pieces: list[Tensor], world: int) -> list[Tensor]:
    """The same tensor, cut for another number of ranks."""
    tensor = whole(pieces)
    return [piece(tensor, rank, world) for rank in range(world)]
