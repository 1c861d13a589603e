"""Max–min fairness against cases computed by hand, and against what defines it."""

from __future__ import annotations

from fractions import Fraction as Part

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.engine.contention.max_min_fairness import Usage, speeds

FINE = Part(1, 10**9)
"""Largest error of a speed where two links hold flows up crosswise."""
USAGES = st.dictionaries(
    st.sampled_from("abcd"), st.fractions(Part(1, 8), Part(1), max_denominator=8), max_size=3
)


def test_flows_that_use_all_of_one_link_get_equal_parts() -> None:
    assert speeds([{"a": Part(1)}] * 3) == (Part(1, 3),) * 3


def test_a_flow_that_needs_little_is_not_slowed_down_and_the_other_gets_the_rest() -> None:
    assert speeds([{"a": Part(1, 5)}, {"a": Part(1)}]) == (Part(1), Part(4, 5))


def test_a_flow_over_two_links_is_as_fast_as_the_busier_one_lets_it_be() -> None:
    """Three flows fill link b at a third each; the second flow then has two thirds of link a."""
    third, whole = Part(1, 3), Part(1)
    assert speeds([{"a": whole, "b": whole}, {"a": whole}, {"b": whole}, {"b": whole}]) == (
        third, 2 * third, third, third,
    )


def test_flows_that_use_a_link_to_different_degrees_get_equal_parts_of_it() -> None:
    """Each flow gets half of the rails. The flow that takes 15/16 of them at full speed is at 8/15
    of that speed."""
    assert speeds([{"rail": Part(15, 16), "fabric": Part(1)}, {"rail": Part(1)}]) == (
        Part(8, 15), Part(1, 2),
    )
    assert speeds([{"rail": Part(1, 2)}, {"rail": Part(1)}]) == (Part(1), Part(1, 2))


def test_a_link_that_nobody_shares_changes_nothing() -> None:
    """A ring over NVLink has 360 GB/s. The NICs of another hold it to 96 GB/s of NVLink: less than
    half, so that the first has the rest."""
    fabric = Part(96, 360)
    assert speeds([{"fabric": fabric, "rail": Part(1)}, {"fabric": Part(1)}]) == (
        Part(1), 1 - fabric,
    )
    assert speeds([{"fabric": fabric}, {"fabric": Part(1)}]) == (Part(1), 1 - fabric)
    assert speeds([{"fabric": Part(15, 16), "rail": Part(1)}, {"fabric": Part(1)}]) == (
        Part(8, 15), Part(1, 2),
    )


def test_two_flows_that_hold_each_other_up_on_two_links_fill_both() -> None:
    """x + y/4 = 1 on one link and x/2 + y = 1 on the other: six sevenths and four."""
    both = speeds([{"a": Part(1), "b": Part(1, 2)}, {"a": Part(1, 4), "b": Part(1)}])
    assert both == (pytest.approx(6 / 7, abs=1e-9), pytest.approx(4 / 7, abs=1e-9))


def test_no_link_no_limit() -> None:
    assert speeds([{}, {"a": Part(1)}]) == (Part(1), Part(1))
    assert speeds([]) == ()


@given(st.lists(USAGES, max_size=6))
def test_no_link_is_overfull_and_whoever_is_slowed_down_has_a_full_link_of_which_nobody_gets_more(
    flows: list[Usage]
) -> None:
    fair = speeds(flows)
    taken = {
        link: [speed * flow.get(link, Part(0)) for flow, speed in zip(flows, fair, strict=True)]
        for link in "abcd"
    }
    assert all(sum(parts) <= 1 + FINE for parts in taken.values())
    assert all(0 < speed <= 1 for speed in fair)
    for index, (flow, speed) in enumerate(zip(flows, fair, strict=True)):
        if speed < 1:
            full = [link for link in flow if sum(taken[link]) >= 1 - FINE]
            assert any(taken[link][index] >= max(taken[link]) - FINE for link in full)


@given(st.lists(USAGES, min_size=1, max_size=6), st.data())
def test_the_order_of_flows_changes_nothing(flows: list[Usage], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(flows))))
    fair = speeds(flows)
    for speed, index in zip(speeds([flows[index] for index in order]), order, strict=True):
        assert abs(speed - fair[index]) <= FINE


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.just(Part(1)), max_size=3), max_size=6))
def test_flows_that_take_as_much_of_all_their_links_are_as_fast_as_filling_them_alike_makes_them(
    flows: list[Usage]
) -> None:
    """Progressive filling, exact in the textbook's own case: all flows grow alike, and a flow that
    meets a full link stops."""
    level, growing = [Part(0)] * len(flows), {index for index, flow in enumerate(flows) if flow}
    while growing:
        free = {
            link: 1 - sum(level[i] for i, flow in enumerate(flows) if link in flow)
            for link in "abcd"
        }
        using = {link: sum(link in flows[i] for i in growing) for link in "abcd"}
        step = min(free[link] / using[link] for link in "abcd" if using[link])
        full = {link for link in "abcd" if using[link] and free[link] == step * using[link]}
        level = [speed + step if i in growing else speed for i, speed in enumerate(level)]
        growing = {i for i in growing if not full & set(flows[i])}
    expected = tuple(speed if flow else Part(1) for flow, speed in zip(flows, level, strict=True))
    assert speeds(flows) == expected
