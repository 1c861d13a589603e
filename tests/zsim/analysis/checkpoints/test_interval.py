"""The best interval between checkpoints, by Young and by Daly."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.checkpoints.interval import best_interval, losses

MINUTE = 60 * 10**9
HOUR = 60 * MINUTE


def test_of_a_minute_and_a_day_both_formulas_are_as_by_hand() -> None:
    """√(2·1·1440) = 53.67 minutes; ·(1 + √(1/2880)/3 + 1/25920) − 1 = 53.00."""
    best = best_interval(MINUTE, 24 * HOUR)
    assert best.young_ns / MINUTE == pytest.approx(53.6656, abs=1e-4)
    assert best.daly_ns / MINUTE == pytest.approx(53.0010, abs=1e-4)


def test_daly_takes_the_mean_time_where_saving_takes_twice_as_long() -> None:
    assert best_interval(2 * HOUR, HOUR).daly_ns == HOUR


@given(
    blocking=st.integers(1, HOUR), mean=st.integers(10 * HOUR, 10_000 * HOUR),
    factor=st.floats(0.2, 5.0),
)
def test_no_other_interval_loses_less_than_youngs(
    blocking: int, mean: int, factor: float
) -> None:
    """Young's is exact where saving is counted by interval: C/T + T/2M; ours counts T + C."""
    def lost(interval: float) -> float:
        return blocking / interval + interval / (2 * mean)

    young = best_interval(blocking, mean).young_ns
    assert lost(young) <= lost(young * factor) * (1 + 1e-9)
    assert lost(young) == pytest.approx(sqrt(2 * blocking / mean), rel=1e-6)


def test_a_failure_loses_half_an_interval_the_save_that_runs_and_the_load() -> None:
    told = losses(
        100 * MINUTE, blocking_ns=MINUTE, whole_ns=4 * MINUTE, load_ns=2 * MINUTE,
        mean_time_ns=10 * HOUR,
    )
    assert told.by_failure_ns == 55 * MINUTE
    assert told.share == pytest.approx(1 / 101 + 55 / 600)
