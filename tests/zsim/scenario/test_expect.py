"""Expectations of a scenario are read with their units and judged exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.errors import ScenarioError
from zsim.scenario.expect import FIGURES, Expectation, Verdict, check, expectation


@pytest.mark.parametrize(("name", "written", "operator", "value"), [
    ("peak_memory", "<= 70 GiB", "<=", 70 * 2**30), ("peak_memory", 212_744, "==", 212_744),
    ("peak_memory", "== 212,744 B", "==", 212_744), ("peak_first_step", "< 1 MiB", "<", 2**20),
    ("exposed_communication", "<= 10 %", "<=", 0.1), ("mfu", ">= 0.4", ">=", 0.4),
    ("step_time", "< 5 ms", "<", 5_000_000), ("all_gathers", 9, "==", 9),
    ("reduce_scatters", ">= 1,000", ">=", 1000),
    ("bytes_sent_per_rank", "== 304,656 B", "==", 304_656), ("all_gathers", "9", "==", 9),
])
def test_an_entry_is_a_comparison_with_a_number(name, written, operator, value):
    entry = expectation(name, written)
    assert (entry.name, entry.operator, entry.value) == (name, operator, value)


@pytest.mark.parametrize(("name", "written", "message"), [
    ("peak_memroy", "<= 1 GiB", "expect.peak_memroy: unknown key, did you mean peak_memory?"),
    ("peak_memory", "80G", "expect.peak_memory: "),
    ("peak_memory", "<= 5 ms", "expect.peak_memory: "),
    ("exposed_communication", 10, "expect.exposed_communication: expected text with a unit"),
    ("exposed_communication", "<= 10", "expect.exposed_communication: expected a comparison "
                                       "(<=, >=, ==, < or >) with a share with its unit"),
    ("peak_memory", "70 GiB", 'expect.peak_memory: expected a comparison, as "<= 70 GiB", '
                              'found "70 GiB"'),
    ("peak_memory", "212744", 'expect.peak_memory: expected a comparison, as "<= 212744"'),
    ("mfu", "40 %", 'expect.mfu: expected a comparison, as "<= 40 %", found "40 %"'),
    ("step_time", "5 ms", 'expect.step_time: expected a comparison, as "<= 5 ms"'),
    ("peak_memory", "<= 80G", "expect.peak_memory: expected a comparison (<=, >=, ==, < or >) "
                              "with a number of B, kB, MB, GB, TB, KiB, MiB, GiB or "
                              'TiB (as "80 GiB"), found "<= 80G"; say which is meant: 80 GB '
                              "or 80 GiB"),
    ("peak_memory", "<= 1,5 GiB", "expect.peak_memory: "),
    ("all_gathers", "1,2", "expect.all_gathers: "), ("step_time", "=< 5 ms", "expect.step_time: "),
    ("all_gathers", "nine", "expect.all_gathers: "), ("all_gathers", -1, "expect.all_gathers: "),
    ("all_gathers", "", "expect.all_gathers: "),
    ("ends", 0, "expect.ends: expected true or false, found 0"),
    ("ends", "false", 'expect.ends: expected true or false, found "false"'),
    ("at_fault", "<= 3", 'expect.at_fault: expected the number of a rank, found "<= 3"'),
    ("at_fault", True, "expect.at_fault: expected the number of a rank, found true"),
    ("at_fault", -1, "expect.at_fault: expected the number of a rank, found -1"),
])
def test_an_entry_that_cannot_be_read_is_refused_by_its_key(name, written, message):
    with pytest.raises(ScenarioError) as caught:
        expectation(name, written)
    assert str(caught.value).startswith(message)


def test_verdicts_say_what_was_expected_and_found():
    wanted = (
        expectation("all_gathers", 9), expectation("peak_memory", "<= 1 MiB"),
        expectation("mfu", ">= 40 %"),
    )
    assert check(wanted, figures={"all_gathers": 8, "peak_memory": 2**20, "mfu": None}) == (
        Verdict(name="all_gathers", expected="9", actual="8", ok=False),
        Verdict(name="peak_memory", expected="<= 1 MiB", actual="1,048,576 B (1.00 MiB)", ok=True),
        Verdict(name="mfu", expected=">= 40 %", actual="unsupported", ok=None),
    )


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.sampled_from(["<=", ">=", "==", "<", ">"]))
def test_bytes_are_compared_as_integers(limit, nbytes, operator):
    item = expectation("peak_memory", f"{operator} {limit} B")
    assert item == Expectation(
        name="peak_memory", operator=operator, value=limit, text=f"{operator} {limit} B"
    )
    (verdict,) = check((item,), figures={"peak_memory": nbytes})
    comparisons = {
        "<=": nbytes <= limit, ">=": nbytes >= limit, "==": nbytes == limit, "<": nbytes < limit
    }
    assert verdict.ok == comparisons.get(operator, nbytes > limit)


@given(st.sampled_from(sorted(FIGURES)), st.one_of(st.text(max_size=60), st.integers()))
def test_any_text_is_read_or_refused_with_its_key(name, written):
    problems: tuple[str, ...] = ()
    try:
        expectation(name, written)
    except ScenarioError as error:
        problems = error.problems
    assert all(problem.startswith(f"expect.{name}: ") for problem in problems)


@pytest.mark.parametrize(("name", "written", "message"), [
    ("all_gathers", -1, 'expect.all_gathers: expected a whole number of at least 0, or text '
                        'as "<= 9", found -1'),
    ("peak_memory", True, "expect.peak_memory: expected a whole number or text, found true"),
    ("step_time", 5, 'expect.step_time: expected text with a unit, as "<= 5 ms" or "<= 10 '
                     '%", found 5'),
])
def test_a_number_that_cannot_be_is_refused_in_its_own_words(name, written, message):
    with pytest.raises(ScenarioError) as caught:
        expectation(name, written)
    assert str(caught.value) == message


@pytest.mark.parametrize("written", ["true", 1, "== 1"])
def test_whether_it_fits_is_true_or_false(written):
    with pytest.raises(ScenarioError, match=r"expect\.fits: expected true or false, found"):
        expectation("fits", written)
    assert expectation("fits", False).text == "false"
