"""The plan of a collective on a ring: each rank's sends, with the time of each alone on its links.

The sends are those of the library of collectives, and so is their time as a whole. Every send of a
step counts as its largest, as in the closed form. For some rank has a full chunk to send in every
step, however they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from zsim.cluster.collectives import LIBRARIES, ring
from zsim.engine.ring_steps.step_times import step_times
from zsim.engine.timeline import RingCosts

if TYPE_CHECKING:
    from zsim.cluster.ring_hops import Hop  # networkx takes 60 ms, which few steps need

MOST_SLICES = 512
"""Most slices of a broadcast that are cut anew. With so many the fill of a chain of 16 ranks takes
three hundredths of what its bytes take."""


class Move(NamedTuple):
    """A rank's send to the next in one step, after it has received `needed` chunks.

    With its links to itself it takes `latency_ns` and `pace_ns`; of the latter the hop is busy for
    `wire_ns`.
    """

    step: int
    needed: int
    latency_ns: int
    pace_ns: int
    wire_ns: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class RingPlan:
    """A collective on a ring that has its links to itself: `alone_ns` with the `launch_ns` before
    the first step; moves and number of chunks received, by position in the ring."""

    alone_ns: int
    launch_ns: int
    num_steps: int
    moves: tuple[tuple[Move, ...], ...]
    receives: tuple[int, ...]


def ring_plan(
    op: str, nbytes: int, *, root: int, hops: Sequence[Hop], costs: RingCosts
) -> RingPlan:
    """The plan of a collective of `nbytes` (the full message) over the ranks of a ring's `hops`.

    A hop that is wider than the ring's narrowest passes chunks as much faster, and waits. Only the
    slices of a broadcast fill their chain at the pace of its narrowest hop, as the closed form has
    them do.
    """
    ranks, cluster, size = tuple([hop.source for hop in hops]), costs.cluster, len(hops)
    if op == "broadcast":
        finer = finer_slices(nbytes, ranks, costs)
        sends = [*ring.steps(op, nbytes, group_size=size, root=root, finer=finer)]
    else:
        sends = [*LIBRARIES[cluster.collectives].steps(op, nbytes, group_size=size)]
    alone_ns, launch_ns = costs.collective_ns(op, nbytes, ranks), cluster.overheads.collective
    sizes = [max(send.nbytes for send in step) for step in sends]
    narrowest = min(hop.bytes_per_s for hop in hops)
    times = step_times(sizes, total_ns=alone_ns - launch_ns, bytes_per_s=narrowest)
    moves: list[list[Move]] = [[] for _ in hops]
    received = [0] * size
    for number, (step, time) in enumerate(zip(sends, times, strict=True)):
        for send in step:
            wire_ns = -(-time.pace_ns * narrowest // hops[send.source].bytes_per_s)
            moves[send.source].append(
                Move(
                    step=number,
                    needed=received[send.source],
                    latency_ns=time.latency_ns,
                    pace_ns=time.pace_ns if op == "broadcast" else wire_ns,
                    wire_ns=wire_ns,
                    nbytes=sizes[number],
                )
            )
        for send in step:
            received[send.destination] += 1
    return RingPlan(alone_ns, launch_ns, len(times), tuple(map(tuple, moves)), tuple(received))


def finer_slices(nbytes: int, ranks: tuple[int, ...], costs: RingCosts) -> int:
    """Factor on the number of a broadcast's slices, a power of 2, with which the fill of the chain
    fits into its time.

    NCCL's time of a broadcast is that of its bytes, since it cuts short messages fine.
    """
    rate = costs.cluster.path(ranks).bytes_per_s
    left_ns = costs.collective_ns("broadcast", nbytes, ranks) - costs.cluster.overheads.collective
    slices, finer = ring.num_sends("broadcast", nbytes, group_size=2), 1

    def wire_ns(number: int) -> int:
        """Time of the bytes of all steps in so many slices."""
        return (len(ranks) - 2 + number) * -(-nbytes * 10**9 // (number * rate))

    while wire_ns(slices * finer) > left_ns and 2 * slices * finer <= MOST_SLICES:
        finer *= 2
    return finer
