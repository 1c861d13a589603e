"""True ring collectives over point-to-point sends, for any group whose backend can send.

Gloo's reduce-scatter is an all-reduce of everything, which sends twice the bytes. Here each rank
sends (N−1)/N of the message for an all-gather or a reduce-scatter, and twice that for an
all-reduce. Chunks and steps are those of `zsim.cluster.collectives.ring`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zsim.ir.sharding import shard


def all_gather(output: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None) -> int:
    """Fill `output` with the shards of all ranks, of which this one has `own`, all of one size;
    returns the bytes sent."""
    ring = _Ring(group)
    chunks = _chunks(output.view(-1), ring.size)
    chunks[ring.rank].copy_(own.view(-1))
    return ring.pass_on(chunks, first=0)


def reduce_scatter(output: Tensor, full: Tensor, *, group: dist.ProcessGroup | None = None) -> int:
    """Fill `output` with this rank's chunk of the sum of all ranks' `full`, whose size the ranks
    divide; returns the bytes sent. `full` stays as it is."""
    ring = _Ring(group)
    chunks = _chunks(full.clone().view(-1), ring.size)
    sent = ring.sum_up(chunks)
    output.view(-1).copy_(chunks[ring.rank])
    return sent


def all_reduce(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> int:
    """Replace a contiguous `tensor` by its sum over all ranks; returns the bytes sent."""
    ring = _Ring(group)
    chunks = _chunks(tensor.view(-1), ring.size)
    return ring.sum_up(chunks) + ring.pass_on(chunks, first=0)


def _chunks(flat: Tensor, num_ranks: int) -> list[Tensor]:
    """Views of `flat` by rank, cut as torch.chunk does; the last ones can be shorter or empty."""
    parts = [shard(flat.numel(), num_shards=num_ranks, rank=rank) for rank in range(num_ranks)]
    return list(flat.split([part.numel for part in parts]))


class _Ring:
    """This rank's place in the ring of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.next, self.previous = (ranks[(self.rank + by) % self.size] for by in (1, -1))

    def sum_up(self, chunks: list[Tensor]) -> int:
        """Reduce: at the end this rank's own chunk holds the sum; the others hold parts of it."""
        sent = 0
        for step in range(self.size - 1):
            mine = chunks[(self.rank - step - 1) % self.size]
            summed = chunks[(self.rank - step - 2) % self.size]
            arrived = torch.empty_like(summed)
            sent += self._exchange(mine, arrived)
            summed.add_(arrived)
        return sent

    def pass_on(self, chunks: list[Tensor], *, first: int) -> int:
        """Gather: at the end every chunk is that of its rank."""
        sent = 0
        for step in range(self.size - 1):
            mine = chunks[(self.rank - step - first) % self.size]
            sent += self._exchange(mine, chunks[(self.rank - step - first - 1) % self.size])
        return sent

    def _exchange(self, mine: Tensor, theirs: Tensor) -> int:
        """Send to the next rank and receive from the one before, at once; returns bytes sent."""
        works = []
        if mine.numel():
            works.append(dist.isend(mine, self.next, group=self.group))
        if theirs.numel():
            works.append(dist.irecv(theirs, self.previous, group=self.group))
        for work in works:
            if work is not None:  # None in ranks outside of the group
                work.wait()
        return mine.numel() * mine.element_size()
