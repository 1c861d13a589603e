"""Compute that hides collectives, handed out nanosecond by nanosecond: by hand, and against a set
of nanoseconds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.causes.free_compute import FreeCompute
from zsim.runs.figures.metrics import TimeInterval


@st.composite
def spans(draw: st.DrawFn) -> list[TimeInterval]:
    """Intervals in order, apart or end to end, some of no length."""
    edges = sorted(draw(st.lists(st.integers(0, 60), max_size=12)))
    return list(pairwise(edges))[::2]


def test_what_is_free_is_taken_once_and_the_last_first() -> None:
    """Compute runs from 0 to 10 and from 20 to 30, a collective from 5 to 25. So 0 to 5 and 25 to
    30 are free."""
    room = FreeCompute([(0, 10), (20, 30)], taken=[(5, 25)])
    assert (room.work(0, 40), room.work(8, 22), room.work(12, 18)) == (20, 4, 0)
    assert room.take(10, 28, 100) == 3
    assert room.take(10, 40, 100) == 2
    assert room.take(0, 10, 3) == 3
    assert room.take(0, 1, 9) == 1
    assert room.take(0, 40, 9) == 1


@given(
    compute=spans(), taken=spans(),
    asked=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 30))),
)
def test_it_hands_out_what_a_set_of_nanoseconds_does(
    compute: list[TimeInterval], taken: list[TimeInterval], asked: list[tuple[int, int, int]]
) -> None:
    room = FreeCompute(compute, taken=taken)
    work = {ns for begin, end in compute for ns in range(begin, end)}
    free = work - {ns for begin, end in taken for ns in range(begin, end)}
    for interval, other, most in asked:
        since, until = min(interval, other), max(interval, other)
        inside = sorted((ns for ns in free if since <= ns < until), reverse=True)[:most]
        assert room.work(since, until) == len([ns for ns in work if since <= ns < until])
        assert room.take(since, until, most) == len(inside)
        free -= set(inside)
