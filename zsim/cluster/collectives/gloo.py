"""Gloo as c10d uses it: its ring, a reduce-scatter that is an all-reduce of everything, and a tree
for broadcast.

Source: gloo at 70dc3602 and torch's ProcessGroupGloo, checked against interface counters. On gloo
`reduce_scatter_tensor` runs all-reduce on the whole input and copies its own slice, twice what a
ring needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zsim.cluster.collectives import ring
from zsim.cluster.collectives.ring import step_ns
from zsim.cluster.library import (
    Library,
    RingStep,
    Send,
    a_ring_but_for_pairs,
    along_the_path,
)
from zsim.cluster.measured_times import times_of

if TYPE_CHECKING:
    from zsim.cluster.cluster import ClusterSpec, Path

LONGER_PERCENT = {"all_gather": 110, "reduce_scatter": 105}
TWO_RANKS_PERCENT = {"all_gather": 150, "reduce_scatter": 105}
"""Percent of the time that an op's bytes take at the rate of an all-reduce.

An all-gather has only two half-shards in flight, and a reduce-scatter copies its slice. Two ranks
have one connection for both directions: a receiver asks for each half, and asks behind its own data
if it arrived later. Three halves then follow one another.

Source: measured over links shaped to 0.2 to 1 Gbit/s, 1 to 4 MB, ranks 0.3 ms apart. 2 ranks took
140 to 152 %, 3 and 4 took 103 to 114 %, a reduce-scatter 99 to 106 %. Two ranks that arrive at once
take 103 %.
"""
_ON_THE_WIRE = {
    "all_gather": "all_gather", "reduce_scatter": "all_reduce", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}


def bytes_sent(op: str, nbytes: int, *, group_size: int, rank: int = 0, root: int = 0) -> int:
    """Bytes that `rank` sends; the root of a broadcast sends ceil(log2 N) messages, a leaf none."""
    if op == "broadcast":
        return nbytes * _num_children((rank - root) % group_size, group_size)
    return ring.bytes_sent(_ON_THE_WIRE[op], nbytes, group_size=group_size, rank=rank)


def num_steps(op: str, nbytes: int, *, group_size: int) -> int:
    """ceil(log2 N) for broadcast; the ring's otherwise, with reduce-scatter counted as all-reduce.
    """
    if op == "broadcast":
        return (group_size - 1).bit_length()
    return ring.num_steps(_ON_THE_WIRE[op], nbytes, group_size=group_size)


def num_sends(op: str, nbytes: int, *, group_size: int) -> int:
    """Number of sends in all steps: one for each rank but the root in a broadcast, else the ring's.
    """
    if op == "broadcast":
        return group_size - 1
    return ring.num_sends(_ON_THE_WIRE[op], nbytes, group_size=group_size)


def duration_ns(op: str, nbytes: int, *, group_size: int, alpha_ns: int, bytes_per_s: int) -> int:
    """The closed form: every step of the tree carries the whole message; the ring's steps carry
    chunks."""
    if op == "broadcast":
        one_step = step_ns(nbytes, alpha_ns=alpha_ns, bytes_per_s=bytes_per_s)
        return num_steps(op, nbytes, group_size=group_size) * one_step
    return ring.duration_ns(
        _ON_THE_WIRE[op], nbytes, group_size=group_size, alpha_ns=alpha_ns, bytes_per_s=bytes_per_s
    )


def in_practice_ns(op: str, closed_form_ns: int, *, group_size: int) -> int:
    """The time of `op` of which the closed form says `closed_form_ns`, rounded up."""
    percent = TWO_RANKS_PERCENT if group_size == 2 else LONGER_PERCENT
    return -(-closed_form_ns * percent.get(op, 100) // 100)


def steps(op: str, nbytes: int, *, group_size: int, root: int = 0) -> Iterator[RingStep]:
    """The sends of each step; in step k of a broadcast those 2^k ranks that have the message send
    it on."""
    if op != "broadcast":
        yield from ring.steps(_ON_THE_WIRE[op], nbytes, group_size=group_size)
        return
    for step in range(num_steps(op, nbytes, group_size=group_size)):
        reach = 2**step
        yield tuple(
            Send((root + position) % group_size, (root + position + reach) % group_size, nbytes)
            for position in range(min(reach, group_size - reach))
        )


def _num_children(position: int, group_size: int) -> int:
    """Number of sends of the rank at `position` (the root is 0) in a binomial tree of
    `group_size`."""
    first = position.bit_length()
    return sum(
        position + 2**step < group_size for step in range(first, (group_size - 1).bit_length())
    )


def _placed_ns(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> int:
    measured = times_of(cluster.times, op, path.num_ranks, nodes=path.num_nodes)
    if measured is not None:
        return measured.ns(nbytes)
    return in_practice_ns(
        op, along_the_path(duration_ns)(op, nbytes, cluster=cluster, path=path),
        group_size=path.num_ranks,
    )


def _algorithm(op: str, nbytes: int, *, cluster: ClusterSpec, path: Path) -> str:
    if op == "broadcast":
        return "tree"
    return a_ring_but_for_pairs(op, nbytes, cluster=cluster, path=path)


LIBRARY = Library(
    bytes_sent=bytes_sent, duration_ns=duration_ns, steps=steps, num_sends=num_sends,
    placed_ns=_placed_ns, algorithm=_algorithm,
)
