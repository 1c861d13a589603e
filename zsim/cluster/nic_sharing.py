"""NICs shared by the ranks of a job: those that sit on one and send over it at the same time.

Groups of a mesh's axis run at once. Where a ring over one of them leaves its node, so do most of
the others, each on the NICs of its own members. Ranks whose group stays inside their node send
nothing then, and devices without a rank never do. This module knows positions, no bandwidth and no
collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from math import lcm


def even(ranks: tuple[int, ...]) -> range:
    """`ranks` if they are evenly spaced and rise, else nothing."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[0] + stride * len(ranks), stride) if stride > 0 else range(0)
    return spaced if tuple(spaced) == ranks else range(0)


def period(group: range, *, per_node: int) -> int:
    """Number of ranks after which a mesh's groups like `group` lie in their nodes as before."""
    return lcm(per_node, len(group) * group.step)


def nics_of_ring(
    ranks: tuple[int, ...], *, num_ranks: int, per_node: int, nics: int
) -> dict[int, Fraction]:
    """Number of a node's `nics` for a ring over `ranks`, by the node that it leaves, less the NICs
    of other groups at that time."""
    if nics >= per_node:
        return {
            node: Fraction(count * nics, per_node)
            for node, count in Counter(rank // per_node for rank in ranks).items()
        }
    sends = _senders(ranks, per_node=per_node)
    shares: dict[int, Fraction] = {}
    for (node, nic), members in Counter(
        (rank // per_node, rank % per_node * nics // per_node) for rank in ranks
    ).items():
        first, last = (node * per_node + -(-each * per_node // nics) for each in (nic, nic + 1))
        # `sends` also answers for ranks beyond the last one
        senders = max(members, sum(map(sends, range(first, min(last, num_ranks)))))
        shares[node] = shares.get(node, Fraction(0)) + Fraction(members, senders)
    return shares


def _senders(ranks: tuple[int, ...], *, per_node: int) -> Callable[[int], bool]:
    """Predicate of ranks: true if a rank's own group, one like `ranks`, leaves its node as this
    does. It is true for all ranks of groups that are in no mesh."""
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
