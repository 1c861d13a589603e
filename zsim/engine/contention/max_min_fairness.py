"""Max–min fairness: speeds of flows that share links, as fractions. Clocks and collectives play no
part."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction

Usage = Mapping[Hashable, Fraction]
"""Share of the bandwidth of each link that a flow takes when it runs at full speed."""

FULL = Fraction(1)
EXACT_ROUNDS, MOST_ROUNDS = 8, 1000
FINEST = 10**12
"""Largest denominator of speeds that do not settle exactly in the first rounds, where two flows
hold each other up on two links."""


def speeds(flows: Sequence[Usage]) -> tuple[Fraction, ...]:
    """The speed of each flow, a fraction of its full speed, when all run at once.

    Max–min fairness (Bertsekas, Gallager 1992, section 6.5.2), counted on every link in its bytes.
    A slowed flow has a full link on which no other flow has a larger share. A flow's
    shares of its links differ, as a ring's of NVLink and of NICs, so links fill in no fixed order.
    So each link is divided in turn until nothing changes. A flow that another link holds up leaves
    the rest of its share to the others. A flow without links runs at full speed.
    """
    users = _users(flows)
    fractions, holds = [FULL] * len(flows), dict[int, Hashable]()  # by flow: link that holds it up
    for turn in range(MOST_ROUNDS):
        before, change = tuple(fractions), Fraction(0 if turn < EXACT_ROUNDS else 1, FINEST)
        for link, among in users.items():
            for index in among:
                if holds.get(index) == link:
                    fractions[index] = FULL  # but for this link, which decides anew
            part = fair_part(flows[index][link] * fractions[index] for index in among)
            for index in among:
                own = part / flows[index][link]
                if own < fractions[index]:
                    holds[index] = link
                    exact = turn < EXACT_ROUNDS
                    fractions[index] = own if exact else own.limit_denominator(FINEST)
        if all(
            abs(speed - earlier) <= change
            for speed, earlier in zip(fractions, before, strict=True)
        ):
            break
    return tuple(fractions)


def fair_part(demands: Iterable[Fraction]) -> Fraction:
    """The largest share of a whole link that a flow gets.

    Flows with demands below an equal share leave the rest of it to the others.
    """
    left, rest = FULL, sorted(demands)
    for index, demand in enumerate(rest):
        each = left / (len(rest) - index)
        if demand >= each:
            return each
        left -= demand
    return FULL


def _users(flows: Sequence[Usage]) -> dict[Hashable, list[int]]:
    """The flows on each link that at full speed need more than the whole link, by link."""
    users: dict[Hashable, list[int]] = {}
    for index, flow in enumerate(flows):
        for link, part in flow.items():
            if part > 0:
                users.setdefault(link, []).append(index)
    return {
        link: among
        for link, among in users.items()
        if sum(flows[index][link] for index in among) > 1
    }
