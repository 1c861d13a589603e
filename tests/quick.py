"""Which of many alike cases the suite takes every time; the others stand behind the marker `slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MOST = 4


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Every case, all but each `step`-th marked `slow`; of more than `MOST` of those only every second one is not.

    Where cases are a product of options, as many more are taken as it needs for each option's every value to be among them.
    """
    cases = list(cases)
    every = step * 2 if len(cases) > MOST * step else step
    taken = set(range(0, len(cases), every))
    seen = {value for place in taken for value in values(cases[place])}
    for place, case in enumerate(cases):
        if not values(case) <= seen:
            taken.add(place)
            seen |= values(case)
    return [case if place in taken else pytest.param(*arguments(case), marks=pytest.mark.slow) for place, case in enumerate(cases)]


def arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def values(case: Any) -> frozenset[tuple[int, str]]:
    """The value of each option; of a case with a single one there is nothing to cover."""
    return frozenset(enumerate(map(repr, case))) if isinstance(case, tuple) else frozenset()
