"""Who shares a NIC: the ranks of a job that sit on it and send over it at the same time. Knows
places, no bandwidth and no collective.

Groups of a mesh's axis run at once: where a ring over one of them leaves its node, so do those over
most of the others, each on the NICs of its own members. Ranks whose group stays inside their node
send nothing then, and places that have no rank never do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from math import lcm


def even(ranks: tuple[int, ...]) -> range:
    """`ranks` if they are evenly spaced and rise, else nothing."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    found = range(ranks[0], ranks[0] + stride * len(ranks), stride) if stride > 0 else range(0)
    return found if tuple(found) == ranks else range(0)


def period(group: range, *, per_node: int) -> int:
    """After how many ranks a mesh's groups like `group` lie in their nodes as before."""
    return lcm(per_node, len(group) * group.step)


def nics_of_ring(
    ranks: tuple[int, ...], *, num_ranks: int, per_node: int, nics: int
) -> dict[int, Fraction]:
    """By node: how many of its `nics` a ring over `ranks` that leaves it has, what others use at
    that time left out."""
    if nics >= per_node:
        return {
            node: Fraction(count * nics, per_node)
            for node, count in Counter(rank // per_node for rank in ranks).items()
        }
    sends = _senders(ranks, per_node=per_node)
    found: dict[int, Fraction] = {}
    for (node, nic), members in Counter(
        (rank // per_node, rank % per_node * nics // per_node) for rank in ranks
    ).items():
        first, last = (node * per_node + -(-each * per_node // nics) for each in (nic, nic + 1))
        # ranks beyond the last one are asked about too
        senders = max(members, sum(map(sends, range(first, min(last, num_ranks)))))
        found[node] = found.get(node, Fraction(0)) + Fraction(members, senders)
    return found


def _senders(ranks: tuple[int, ...], *, per_node: int) -> Callable[[int], bool]:
    """Whether a rank's own group, one like `ranks`, leaves its node as this does; of groups that
    are in no mesh every one may."""
    group = even(ranks)
    if not group:
        return lambda rank: True
    whole, stride = len(group) * group.step, group.step
    # a mesh's blocks begin at multiples of their size; others as this one does
    origin = (group.start - group.start % stride) % whole

    def sends(rank: int) -> bool:
        inside = (rank - origin) % whole
        first = rank - inside + inside % stride
        return first // per_node != (first + whole - stride) // per_node

    return sends
