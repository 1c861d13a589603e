"""Text and numbers that cost too much are refused, and harmless ones are not."""

import pytest

from zsim.errors import ScenarioError
from zsim.io import limits


def refused(text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        limits.check_text(text.encode(), where="x.toml")
    return str(caught.value)


def test_a_deep_dotted_key_of_40_kilobytes_is_refused_by_its_line():
    assert refused("x = 1\n" + "a." * 20_000 + "a = 1") == (
        "x.toml: line 2: expected keys of at most 8 parts, found a longer one"
    )


@pytest.mark.parametrize("text", [
    "a.b.c.d.e.f.g.h = 1", 'a = "....................."', "# ..........................",
    "a = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]",
])
def test_fewer_parts_and_other_dots_do_no_harm(text):
    assert limits.check_text(text.encode(), where="x.toml") == text


def test_a_file_over_256_kibibytes_is_refused():
    assert refused("#" * (256 * 1024 + 1)) == "x.toml: expected at most 262,144 bytes, found more"


def test_bytes_that_are_no_text_are_refused_by_their_place():
    with pytest.raises(ScenarioError, match=r"x\.toml: expected UTF-8 text, found byte 0xff at 1"):
        limits.check_text(b"a\xff", where="x.toml")


def test_numbers_that_are_not_finite_or_too_long_are_named_by_key():
    table = {"a": {"b": [1, float("inf")]}, "c": float("nan"), "d": 1 << 70, "e": 1.5, "f": True}
    assert limits.number_problems(table) == (
        "a.b[1]: expected a finite number, found inf", "c: expected a finite number, found nan",
        "d: expected an integer of at most 64 bits, found a longer one",
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_integers_are_let_through_and_one_more_on_either_side_is_not(sign):
    assert limits.number_problems({"a": sign * limits.MAX_INT}) == ()
    assert limits.number_problems({"a": sign * (limits.MAX_INT + 1)}) == (
        "a: expected an integer of at most 64 bits, found a longer one",
    )
