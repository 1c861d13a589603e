"""Which of many alike cases the suite takes every time; the others stand behind the marker `slow`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count
from math import gcd
from typing import Any

import pytest

MOST = 4
FEW = 4
"""Values of an option that are all taken; of longer lists, as of models, some are."""


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Every case, all but each `step`-th marked `slow`; of more than `MOST` of those only every
    second one is not, of twice as many every third.

    Where cases are a product of options, the step grows until it shares no factor with the number
    of values of any of them, and as few more are taken as it needs for each value of a short option
    to be among them.
    """
    cases = list(cases)
    sizes = Counter(place for place, _ in {value for case in cases for value in values(case)})
    least = step * (1 + (len(cases) > MOST * step) + (len(cases) > 2 * MOST * step))
    every = next(one for one in count(least) if all(gcd(one, size) == 1 for size in sizes.values()))
    taken = set(range(0, len(cases), every))
    found = {value for place in taken for value in values(cases[place])}
    missing = {value for case in cases for value in values(case) if sizes[value[0]] <= FEW} - found
    while missing:
        place = max(range(len(cases)), key=lambda place: len(missing & values(cases[place])))
        taken.add(place)
        missing -= values(cases[place])
    return [
        case if place in taken else pytest.param(*arguments(case), marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]


def arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def values(case: Any) -> frozenset[tuple[int, str]]:
    """The value of each option; of a case with a single one there is nothing to cover."""
    return frozenset(enumerate(map(repr, case))) if isinstance(case, tuple) else frozenset()
