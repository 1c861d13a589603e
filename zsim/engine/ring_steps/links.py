"""Links that several rings want at once: which they are, and what each hop wants of them.

A link serves in the order of requests, slice by slice, so rings with chunks waiting for it take
turns (`zsim.engine.ring_steps.turns`). A chunk asks all its links at once and has passed when the
last of them is done. So no ring holds a link while it waits for another, and none can block another
for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from zsim.cluster.collectives.nccl.buffers import SIMPLE
from zsim.cluster.ring_hops import DirectedLink, Hop, LinkUse

SLICE_NBYTES = SIMPLE // 8
"""Most bytes for which a link is held in one turn: NCCL moves a channel's buffer in 8 steps.
Source: NCCL 2.30.7, NCCL_STEPS in src/include/device.h."""

Place = tuple[Any, int]
"""A hop: its ring, by whatever names that, and its position there."""


class Lane(NamedTuple):
    """A hop's use of a shared link, by the link's number.

    A `part` of each chunk goes there, and takes a `share` of the bandwidth while the hop is busy.
    """

    link: int
    part: Fraction
    share: Fraction

    def slices(self, nbytes: int) -> int:
        """The number of turns that a chunk of `nbytes` takes."""
        part = self.part
        return max(1, -(-part.numerator * nbytes // (part.denominator * SLICE_NBYTES)))

    def hold_ns(self, wire_ns: int) -> int:
        """The time that the link needs for a chunk with which the hop is busy for `wire_ns`."""
        return -(-self.share.numerator * wire_ns // self.share.denominator)


def shared_lanes(rings: Mapping[Any, Sequence[Hop]]) -> tuple[int, dict[Place, tuple[Lane, ...]]]:
    """The number of links that several of `rings` want, and together want more than all of, and the
    lanes that hops have there.

    Flows contend by the same rule (`zsim.engine.contention.link_contention.contended`). Links that
    the same hops want alike, such as those of a way one behind the other, are one.

    A ring wants no more than all of a link, however many of its hops go there. A node's rings, one
    for each NIC, are one here. A device next to a NIC sends to it in one of them, and to the next
    device in the others.
    """
    users: dict[DirectedLink, dict[Place, LinkUse]] = {}
    for key, ring in rings.items():
        for position, hop in enumerate(ring):
            for use in hop.uses:
                users.setdefault(use.link, {})[key, position] = use
    numbers: dict[frozenset[Any], int] = {}
    lanes: dict[Place, tuple[Lane, ...]] = {}
    for among in users.values():
        wanted: dict[Any, Fraction] = {}
        for (key, _), use in among.items():
            wanted[key] = wanted.get(key, Fraction(0)) + use.share
        if len(wanted) == 1 or sum(min(Fraction(1), each) for each in wanted.values()) <= 1:
            continue
        shares = {
            (key, position): use.share / max(Fraction(1), wanted[key])
            for (key, position), use in among.items()
        }
        alike = frozenset((at, among[at].part, share) for at, share in shares.items())
        if alike not in numbers:
            numbers[alike] = len(numbers)
            for at, share in shares.items():
                lane = Lane(numbers[alike], among[at].part, share)
                lanes[at] = (*lanes.get(at, ()), lane)
    return len(numbers), lanes
