"""The plan by which torch DCP writes each tensor once, although several ranks may hold it.

Source: torch/distributed/checkpoint/_dedup_save_plans.py of torch 2.13, `dedup_save_plans`. Ranks'
plans are gone through in turn. A tensor goes to the plan with the fewest bytes so far of those that
have it. Rank 0's own shards come first, so replicated tensors go to others.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.analysis.checkpoints.state import StateTensor


def written(held: Sequence[Sequence[StateTensor]]) -> tuple[tuple[StateTensor, ...], ...]:
    """The tensors that each rank writes, of those that it has `held`, in its order.

    An empty tensor counts as one byte, as torch counts it.

    >>> both = StateTensor(key=("step", 0, -1), nbytes=4)
    >>> own = StateTensor(key=("parameters", 0, 0), nbytes=8)
    >>> [[tensor.nbytes for tensor in file] for file in written([[own, both], [both]])]
    [[8], [4]]
    """
    owners: dict[tuple[str, int, int], list[int]] = {}
    tensors: dict[tuple[str, int, int], StateTensor] = {}
    for rank, own in enumerate(held):
        for tensor in own:
            owners.setdefault(tensor.key, []).append(rank)
            tensors[tensor.key] = tensor
    totals, chosen = [0] * len(held), dict[tuple[str, int, int], int]()
    for key, ranks in owners.items():
        rank = ranks[0] if len(ranks) == 1 else min(ranks, key=totals.__getitem__)
        totals[rank] += tensors[key].nbytes or 1
        chosen[key] = rank
    return tuple(
        tuple(tensor for tensor in own if chosen[tensor.key] == rank)
        for rank, own in enumerate(held)
    )
