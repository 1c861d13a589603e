"""The best interval between checkpoints, by Young and by Daly."""

from __future__ import annotations

from math import exp, sqrt

import pytest
from hypothesis import example, given
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
    assert told.share == pytest.approx(1 - 100 / (600 * exp(5 / 600) * (exp(101 / 600) - 1)))
    assert told.makes_progress


def best_by_bisection(blocking: float) -> float:
    """The T with the least time for M = 1: where exp(T + C)·(1 − T) = 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exp(middle + blocking) * (1 - middle) > 1 else (low, middle)
    return low


@example(1.999999)  # the worst
@given(st.floats(1e-6, 100.0))
def test_young_is_near_the_best_up_to_a_hundredth_and_daly_for_any_save(blocking: float) -> None:
    told, best = best_interval(round(blocking * HOUR), HOUR), best_by_bisection(blocking)
    assert told.daly_ns / HOUR == pytest.approx(best, rel=0.062)
    assert told.young_holds == (round(blocking * HOUR) <= HOUR / 100)
    if told.young_holds:
        assert told.young_ns / HOUR == pytest.approx(best, rel=0.05)


@given(
    interval=st.integers(1, 10**20), blocking=st.integers(1, 10**16), more=st.integers(0, 10**16),
    load=st.integers(0, 10**20), mean=st.integers(1, 10**20),
)
def test_lost_time_is_a_share_and_more_failures_lose_more(
    interval: int, blocking: int, more: int, load: int, mean: int
) -> None:
    def share(mean_time: int) -> float:
        return losses(
            interval, blocking_ns=blocking, whole_ns=blocking + more, load_ns=load,
            mean_time_ns=mean_time,
        ).share

    assert -1e-9 <= share(2 * mean) <= share(mean) + 1e-9 <= 1 + 1e-9


def test_a_load_that_outlasts_the_time_between_failures_lets_no_job_make_progress() -> None:
    told = losses(
        HOUR, blocking_ns=MINUTE, whole_ns=MINUTE, load_ns=5 * HOUR, mean_time_ns=HOUR
    )
    assert not told.makes_progress
