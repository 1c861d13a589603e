"""Links that several flows use at once, shared by max–min fairness; speeds are fractions. Knows no
clock and no collective."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction

Usage = Mapping[Hashable, Fraction]
"""Of each link that a flow uses: the part of the link's bandwidth that it takes when it runs at
full speed."""

FULL = Fraction(1)
EXACT_ROUNDS, MOST_ROUNDS = 8, 1000
FINEST = 10**12
"""The largest denominator of speeds that do not settle exactly in the first rounds, where two flows
hold each other up on two links."""


def speeds(flows: Sequence[Usage]) -> tuple[Fraction, ...]:
    """The speed of each flow, a fraction of its full speed, when all run at once.

    Max–min fairness (Bertsekas, Gallager 1992, section 6.5.2), counted on every link in bytes of
    that link: whoever is slowed down has a full link of which nobody gets more. A flow takes other
    parts of one link than of another, as a ring does of NVLink and of NICs, so links have no one
    order in which they fill. Each is divided in turn, and what a flow cannot use, since another
    link holds it up, is left to the others, until nothing changes. A flow without links runs at
    full speed.
    """
    users = _users(flows)
    found, holds = [FULL] * len(flows), dict[int, Hashable]()
    """The speeds, and by flow the link that holds it up."""
    for turn in range(MOST_ROUNDS):
        before, change = tuple(found), Fraction(0 if turn < EXACT_ROUNDS else 1, FINEST)
        for link, among in users.items():
            for index in among:
                if holds.get(index) == link:
                    found[index] = FULL  # but for this link, which decides anew
            part = fair_part(flows[index][link] * found[index] for index in among)
            for index in among:
                own = part / flows[index][link]
                if own < found[index]:
                    holds[index] = link
                    found[index] = own if turn < EXACT_ROUNDS else own.limit_denominator(FINEST)
        if all(
            abs(speed - earlier) <= change for speed, earlier in zip(found, before, strict=True)
        ):
            break
    return tuple(found)


def fair_part(asked: Iterable[Fraction]) -> Fraction:
    """Of a whole link, the most that anybody gets: those who ask for less than an equal part leave
    the rest of theirs to the others."""
    left, rest = FULL, sorted(asked)
    for place, one in enumerate(rest):
        each = left / (len(rest) - place)
        if one >= each:
            return each
        left -= one
    return FULL


def _users(flows: Sequence[Usage]) -> dict[Hashable, list[int]]:
    """By link: the flows that use it, where at full speed they need more of it than there is."""
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
