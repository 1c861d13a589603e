"""`check_collectives`: laws of a user's own reduce-scatter and all-gather, on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zreal.testing.sharded.breaches import Breach, Group, differs, require

__tracebackhide__ = True  # reports of pytest end at the user's own line
NUMELS = (0, 1, 2, 3, 8, 61)
"""Elements of each rank's piece by default."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SUMS = 251
"""Sums stay below this, so that each dtype holds them exactly in any order of additions."""


def check_collectives(
    reduce_scatter: Callable[[Tensor], Tensor],
    all_gather: Callable[[Tensor], Tensor],
    *,
    numels: Sequence[int] = NUMELS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> int:
    """The number of tensors for which all laws hold; ShardLawError on all ranks at the smallest
    for which one does not.

    `reduce_scatter(tensor)` gives this rank's piece of the sum over ranks, `all_gather(piece)` the
    pieces in order of ranks. Each of `numels` is a piece's elements; all ranks call this.
    """
    number = 0
    for numel in sorted(numels):
        for dtype in dtypes:
            _require(reduce_scatter, all_gather, _case(numel, dtype, device, group), group)
            number += 1
    return number


class _Tensors:
    """This rank's tensors of one case, and what collectives must make of them."""

    def __init__(self, of_ranks: list[Tensor], rank: int) -> None:
        self.own = of_ranks[rank]
        self.sum = torch.stack(of_ranks).sum(0).to(self.own.dtype)
        self.pieces = list(self.sum.chunk(len(of_ranks))) if self.sum.numel() else [self.sum]
        self.piece = self.pieces[rank] if self.sum.numel() else self.sum


def _case(numel: int, dtype: torch.dtype, device: torch.device | str, group: Group) -> _Tensors:
    """Whole numbers, other ones on each rank, whose sum over ranks is exact."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    most, index = SUMS // world, torch.arange(numel * world, device=device)
    return _Tensors(
        [((7 * index + 3 * other + 1) % max(most, 2)).to(dtype) for other in range(world)], rank
    )


def _require(
    reduce_scatter: Callable[[Tensor], Tensor], all_gather: Callable[[Tensor], Tensor],
    case: _Tensors, group: Group,
) -> None:
    argument = case.own.clone()
    piece = reduce_scatter(argument)
    require(
        "reduce_scatter_gives_a_piece_of_the_sum",
        _breach(case, differs(piece, case.piece, name="its piece")), group=group,
    )
    taken = case.piece.clone()
    whole = all_gather(taken)
    require(
        "all_gather_joins_pieces_in_order",
        _breach(case, differs(whole, case.sum, name="the whole")), group=group,
    )
    left = differs(argument, case.own, name="the argument of reduce_scatter") or differs(
        taken, case.piece, name="the argument of all_gather"
    )
    require("arguments_are_left_as_they_were", _breach(case, left), group=group)
    reduced = case.own.clone()
    dist.all_reduce(reduced, group=group)
    both = differs(all_gather(reduce_scatter(case.own.clone())), reduced, name="the whole")
    require(
        "all_gather_of_reduce_scatter_is_all_reduce", _breach(case, both), group=group
    )


def _breach(case: _Tensors, how: str) -> Iterator[Breach]:
    if how:
        yield Breach(
            case.own.numel(), f"a tensor of {case.own.numel()} elements of {case.own.dtype}", how
        )
