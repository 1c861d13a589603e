"""Max–min fairness against cases computed by hand, and against what defines it."""

from __future__ import annotations

from fractions import Fraction as Part

from hypothesis import given
from hypothesis import strategies as st

from zsim.sharing import Usage, speeds

USAGES = st.dictionaries(st.sampled_from("abcd"), st.fractions(Part(1, 8), Part(1), max_denominator=8), max_size=3)


def test_flows_that_use_all_of_one_link_get_equal_parts() -> None:
    assert speeds([{"a": Part(1)}] * 3) == (Part(1, 3),) * 3


def test_a_flow_that_needs_little_is_not_slowed_down_and_the_other_gets_the_rest() -> None:
    assert speeds([{"a": Part(1, 5)}, {"a": Part(1)}]) == (Part(1), Part(4, 5))


def test_a_flow_over_two_links_is_as_fast_as_the_busier_one_lets_it_be() -> None:
    """Three flows fill link b at a third each; the second flow then has two thirds of link a."""
    third, one = Part(1, 3), Part(1)
    assert speeds([{"a": one, "b": one}, {"a": one}, {"b": one}, {"b": one}]) == (third, 2 * third, third, third)


def test_two_flows_that_use_a_link_to_different_degrees_grow_alike_until_it_is_full() -> None:
    """Each counted on the link that it uses most: y · 15/16 + y fills the rails at y = 16/31."""
    assert speeds([{"rail": Part(15, 16), "fabric": Part(1)}, {"rail": Part(1)}]) == (Part(16, 31), Part(16, 31))
    assert speeds([{"rail": Part(1, 2)}, {"rail": Part(1)}]) == (Part(1), Part(1, 2))


def test_no_link_no_limit() -> None:
    assert speeds([{}, {"a": Part(1)}]) == (Part(1), Part(1))
    assert speeds([]) == ()


@given(st.lists(USAGES, max_size=6))
def test_no_link_is_overfull_and_whoever_is_slowed_down_has_a_full_link_on_which_nobody_gets_more(flows: list[Usage]) -> None:
    found = speeds(flows)
    load = {link: sum((speed * flow.get(link, Part(0)) for flow, speed in zip(flows, found, strict=True)), Part(0)) for link in "abcd"}
    assert all(part <= 1 for part in load.values())
    assert all(0 < speed <= 1 for speed in found)
    level = [speed * max(flow.values(), default=Part(0)) for flow, speed in zip(flows, found, strict=True)]
    for flow, speed, own in zip(flows, found, level, strict=True):
        if speed < 1:
            full = [link for link in flow if load[link] == 1]
            assert any(own == max(level[i] for i, other in enumerate(flows) if link in other) for link in full)


@given(st.lists(USAGES, min_size=1, max_size=6), st.data())
def test_the_order_of_flows_changes_nothing(flows: list[Usage], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(flows))))
    found = speeds(flows)
    assert speeds([flows[index] for index in order]) == tuple(found[index] for index in order)
