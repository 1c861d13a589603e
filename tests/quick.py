"""Which of many alike cases the suite takes every time; the others stand behind the marker `slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MOST = 4


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Every case, all but each `step`-th marked `slow`; of more than `MOST` of those only every second one is not. A step that shares no
    factor with the number of values of any option, where cases are a product of options, leaves each value among those that are taken."""
    cases = list(cases)
    every = step * 2 if len(cases) > MOST * step else step
    return [
        case
        if place % every == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
