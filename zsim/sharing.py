"""Links that several flows use at once, shared by max–min fairness; speeds are exact fractions. Knows no clock and no collective."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction

Usage = Mapping[Hashable, Fraction]
"""Of each link that a flow uses: the part of the link's bandwidth that it takes when it runs at full speed."""


def speeds(flows: Sequence[Usage]) -> tuple[Fraction, ...]:
    """The speed of each flow, a fraction of its full speed, when all run at once.

    Progressive filling (Bertsekas, Gallager 1992, section 6.5.2): all flows grow alike, counted on the link that each uses most,
    until a link is full or a flow is at full speed; those stop, the others go on. A flow without links runs at full speed.
    """
    most = [max(flow.values(), default=Fraction(0)) for flow in flows]
    level = [Fraction(0)] * len(flows)
    growing = {index for index, top in enumerate(most) if top > 0}
    room = {link: Fraction(1) for flow in flows for link in flow}
    while growing:
        load = _load(flows, most, growing)
        step = min(
            [most[index] - level[index] for index in growing] + [room[link] / load[link] for link in load if load[link] > 0]
        )
        for link, per_step in load.items():
            room[link] -= step * per_step
        for index in growing:
            level[index] += step
        growing = {
            index
            for index in growing
            if level[index] < most[index] and all(room[link] > 0 for link, part in flows[index].items() if part > 0)
        }
    return tuple(level[index] / top if top > 0 else Fraction(1) for index, top in enumerate(most))


def _load(flows: Sequence[Usage], most: Sequence[Fraction], growing: set[int]) -> dict[Hashable, Fraction]:
    """How fast each link fills when all growing flows grow by one on the link that each uses most."""
    load: dict[Hashable, Fraction] = {}
    for index in growing:
        for link, part in flows[index].items():
            load[link] = load.get(link, Fraction(0)) + part / most[index]
    return load
