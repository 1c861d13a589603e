"""Samples many alike cases: the suite always runs some, the marker `slow` holds the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count
from math import gcd
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

WHOLE = settings(max_examples=15)
"""Settings of tests that plan, replay or simulate a whole scenario: each draw takes a tenth of a
second, not a microsecond."""
collectives = st.sampled_from(
    ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]
)
"""The ops that every collective library knows."""
MOST = 4
FEW = 4
"""Longest list of an option's values that are all sampled; of longer ones, some are."""


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Every case, all but each `step`-th marked `slow`.

    Where more than `MOST` would remain, every second of them does, of twice as many every third.
    For a product of options, the step grows until it shares no factor with any option's number of
    values. Further cases are then sampled until each value of a short option is among them.
    """
    cases = list(cases)
    sizes = Counter(option for option, _ in {value for case in cases for value in values(case)})
    least = step * (1 + (len(cases) > MOST * step) + (len(cases) > 2 * MOST * step))
    every = next(n for n in count(least) if all(gcd(n, size) == 1 for size in sizes.values()))
    taken = set(range(0, len(cases), every))
    covered = {value for index in taken for value in values(cases[index])}
    short = {value for case in cases for value in values(case) if sizes[value[0]] <= FEW}
    missing = short - covered
    while missing:
        index = max(range(len(cases)), key=lambda index: len(missing & values(cases[index])))
        taken.add(index)
        missing -= values(cases[index])
    return [
        case if index in taken else pytest.param(*arguments(case), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def values(case: Any) -> frozenset[tuple[int, str]]:
    """The value of each option; of a case with a single one there is nothing to cover."""
    return frozenset(enumerate(map(repr, case))) if isinstance(case, tuple) else frozenset()
