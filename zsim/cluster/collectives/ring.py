"""The ring, as NCCL runs all-gather, reduce-scatter, all-reduce and broadcast: in closed form, and
as explicit steps. An all-to-all is here too, whose ranks exchange pair by pair.

A message of B bytes is cut into N chunks by the rule of `torch.chunk` (the last ones can be shorter
or empty). In each step every rank sends one chunk to the next rank. Some rank always sends a full
chunk of ceil(B/N) bytes, and every step takes as long as that one. This module knows bytes and
nanoseconds, and no streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from zsim.cluster.library import Library, RingStep, Send, along_the_path
from zsim.ir.sharding import shard, shard_size

BROADCAST_SLICE_NBYTES = 4 * 2**20
"""A broadcast goes down the chain in slices of this size, NCCL's buffer per channel."""
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
"""Times that each rank sends to N − 1 others, or N − 1 times to the next one."""


def step_ns(nbytes: int, *, alpha_ns: int, bytes_per_s: int) -> int:
    """α + nbytes/β in nanoseconds, rounded up once, and at least 1."""
    return max(1, alpha_ns + -(-nbytes * 10**9 // bytes_per_s))


@lru_cache(maxsize=1 << 14)
def bytes_sent(op: str, nbytes: int, *, group_size: int, rank: int = 0, root: int = 0) -> int:
    """Bytes that `rank` puts on the wire for a message of `nbytes` (the full, unsharded one).

    M·(N−1)/N for all-gather and reduce-scatter, and twice that for all-reduce, when N divides M.
    Otherwise a rank sends all chunks but its own (reduce-scatter) or but its successor's
    (all-gather). In an all-to-all it keeps its own chunk. In a broadcast every rank but the last of
    the chain passes the whole message on.
    """
    if group_size == 1:
        return 0
    if op == "broadcast":
        return 0 if (rank - root) % group_size == group_size - 1 else nbytes
    own = shard(nbytes, num_shards=group_size, rank=rank).numel
    next_rank = shard(nbytes, num_shards=group_size, rank=(rank + 1) % group_size).numel
    sent = {"all_gather": nbytes - next_rank, "reduce_scatter": nbytes - own}
    sent["all_to_all"] = sent["reduce_scatter"]
    return sent[op] if op in sent else {"all_reduce": 2 * nbytes - own - next_rank}[op]


def num_steps(op: str, nbytes: int, *, group_size: int) -> int:
    """N−1 for all-gather, reduce-scatter and all-to-all, 2(N−1) for all-reduce, N−2 and one per
    slice for broadcast; 0 alone."""
    if group_size == 1:
        return 0
    if op == "broadcast":
        return group_size - 2 + _num_slices(nbytes)
    return PASSES[op] * (group_size - 1)


def num_sends(op: str, nbytes: int, *, group_size: int, finer: int = 1) -> int:
    """Number of sends in all steps: N in each, and in a broadcast N−1 of each slice; `finer` as of
    `steps`."""
    if op == "broadcast":
        return (group_size - 1) * _num_slices(nbytes) * finer
    return num_steps(op, nbytes, group_size=group_size) * group_size


def duration_ns(op: str, nbytes: int, *, group_size: int, alpha_ns: int, bytes_per_s: int) -> int:
    """The closed form: steps times the time of the largest chunk (Thakur, Rabenseifner, Gropp 2005,
    ring terms).

    The last step of a broadcast carries nothing but the last slice, which can be shorter than the
    others.
    """
    num = num_steps(op, nbytes, group_size=group_size)
    if num == 0:
        return 0
    parts = _num_slices(nbytes) if op == "broadcast" else group_size
    largest = shard_size(nbytes, parts)
    last = nbytes - (parts - 1) * largest if op == "broadcast" else largest
    one_step, last_step = (
        step_ns(chunk, alpha_ns=alpha_ns, bytes_per_s=bytes_per_s) for chunk in (largest, last)
    )
    return (num - 1) * one_step + last_step


def steps(
    op: str, nbytes: int, *, group_size: int, root: int = 0, finer: int = 1
) -> Iterator[RingStep]:
    """The sends of each step; a step begins when all sends of the one before have arrived.

    `finer`: the slices of a broadcast are so many times as many.
    """
    if group_size == 1:
        return
    if op == "broadcast":
        slices = _num_slices(nbytes) * finer
        yield from _broadcast_steps(nbytes, group_size=group_size, root=root, num_slices=slices)
        return
    if op == "all_to_all":
        yield from _pair_steps(nbytes, group_size=group_size)
    if op in ("reduce_scatter", "all_reduce"):
        yield from _chunk_steps(nbytes, group_size=group_size, first=1)
    if op in ("all_gather", "all_reduce"):
        yield from _chunk_steps(nbytes, group_size=group_size, first=0)


def _chunk_steps(nbytes: int, *, group_size: int, first: int) -> Iterator[RingStep]:
    """Steps of a ring: in step s rank r sends chunk r − s − first. A reduce-scatter (first 1) ends
    with chunk r on rank r."""
    chunks = [shard(nbytes, num_shards=group_size, rank=rank).numel for rank in range(group_size)]
    for step in range(group_size - 1):
        yield tuple(
            Send(rank, (rank + 1) % group_size, chunks[(rank - step - first) % group_size])
            for rank in range(group_size)
        )


def _pair_steps(nbytes: int, *, group_size: int) -> Iterator[RingStep]:
    """Steps of pairs: in step s rank r sends rank r + s its chunk."""
    chunks = [shard(nbytes, num_shards=group_size, rank=rank).numel for rank in range(group_size)]
    for step in range(1, group_size):
        receivers = [(rank + step) % group_size for rank in range(group_size)]
        yield tuple(Send(rank, to, chunks[to]) for rank, to in enumerate(receivers))


def _num_slices(nbytes: int) -> int:
    return max(1, shard_size(nbytes, BROADCAST_SLICE_NBYTES))


def _broadcast_steps(
    nbytes: int, *, group_size: int, root: int, num_slices: int
) -> Iterator[RingStep]:
    """Slice k leaves the chain's position p in step k + p; all slices but the last ones are of full
    size."""
    sizes = [shard(nbytes, num_shards=num_slices, rank=index).numel for index in range(num_slices)]
    for step in range(group_size - 2 + num_slices):
        positions = range(max(0, step - num_slices + 1), min(group_size - 1, step + 1))
        yield tuple(
            Send(
                (root + position) % group_size, (root + position + 1) % group_size,
                sizes[step - position],
            )
            for position in positions
        )


LIBRARY = Library(
    bytes_sent=bytes_sent, duration_ns=duration_ns, steps=steps, num_sends=num_sends,
    placed_ns=along_the_path(duration_ns),
)
