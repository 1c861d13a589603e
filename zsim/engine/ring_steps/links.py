"""Links that several rings want at once: which they are, and how they serve chunks.

A link serves in the order of requests, slice by slice, so rings with chunks waiting for it take
turns. A chunk asks all its links at once and has passed when the last of them is done. So no ring
holds a link while it waits for another, and none can block another for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

import simpy

from zsim.cluster.collectives.nccl.buffers import SIMPLE
from zsim.cluster.ring_hops import DirectedLink, Hop, LinkUse
from zsim.engine.ring_steps.part import Process

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
        return max(1, ceil(self.part * nbytes / SLICE_NBYTES))

    def hold_ns(self, wire_ns: int) -> int:
        """The time that the link needs for a chunk with which the hop is busy for `wire_ns`."""
        return ceil(self.share * wire_ns)


def shared_lanes(rings: Mapping[Any, Sequence[Hop]]) -> tuple[int, dict[Place, tuple[Lane, ...]]]:
    """The number of links that several of `rings` want, and together want more than all of, and the
    lanes that hops have there.

    Flows contend by the same rule (`zsim.engine.contention.link_contention.contended`). Links that
    the same hops want alike, such as those of a way one behind the other, are one.
    """
    users: dict[DirectedLink, dict[Place, LinkUse]] = {}
    for key, ring in rings.items():
        for position, hop in enumerate(ring):
            for use in hop.uses:
                users.setdefault(use.link, {})[key, position] = use
    numbers: dict[frozenset[Any], int] = {}
    lanes: dict[Place, tuple[Lane, ...]] = {}
    for among in users.values():
        wanted = sum(use.share for use in among.values())
        if wanted <= 1 or len({key for key, _ in among}) == 1:
            continue
        alike = frozenset((hop_place, use.part, use.share) for hop_place, use in among.items())
        if alike not in numbers:
            numbers[alike] = len(numbers)
            for hop_place, use in among.items():
                lane = Lane(numbers[alike], use.part, use.share)
                lanes[hop_place] = (*lanes.get(hop_place, ()), lane)
    return len(numbers), lanes


def carry(
    environment: simpy.Environment, link: simpy.Resource, *, hold_ns: int, slices: int
) -> Process:
    """Process that holds `link` for `hold_ns` in all, and between `slices` gives way to others."""
    granted = link.request()
    yield granted
    for turn in range(slices):
        if turn and link.queue:
            link.release(granted)
            granted = link.request()
            yield granted
        own = hold_ns * (turn + 1) // slices - hold_ns * turn // slices
        yield environment.timeout(own)
    link.release(granted)
