"""Hostile text is refused in linear time, and harmless text is not."""

import time

import pytest

from zsim.errors import ScenarioError
from zsim.io import limits


def refused(text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        limits.check_text(text.encode(), where="x.toml")
    return str(caught.value)


def test_a_deep_dotted_key_of_40_kilobytes_is_refused_at_once():
    began = time.thread_time()
    assert refused("a." * 20_000 + "a = 1") == (
        "x.toml: line 1: expected keys of at most 8 parts, found a longer one"
    )
    assert time.thread_time() - began < 0.5


def test_a_key_of_as_many_parts_as_there_may_be_is_read_and_one_more_is_not():
    assert limits.scan("a.b.c.d.e.f.g.h = 1") == ""
    assert limits.scan("a.b.c.d.e.f.g.h.i = 1") == (
        "line 1: expected keys of at most 8 parts, found a longer one"
    )


def test_as_many_brackets_as_there_may_be_are_read():
    assert limits.scan("x = " + "[" * 16 + "]" * 16) == ""


@pytest.mark.parametrize("text", ["x = " + "[" * 17, "x = " + "{a=" * 17])
def test_deep_nesting_is_refused(text):
    assert refused(text) == "x.toml: line 1: expected at most 16 nested brackets, found more"


def test_a_deep_key_behind_a_quote_is_found():
    assert "expected keys of at most 8 parts" in refused('x = {"" = 1, ' + "a." * 30 + "a = 1}")


@pytest.mark.parametrize("quotes", ['"', "'", '"""', "'''"])
def test_a_string_without_end_is_refused_by_its_line(quotes):
    assert refused(f"a = 1\nb = {quotes}abc") == (
        "x.toml: line 2: not TOML: a string begins here and does not end"
    )


class Counted(str):
    """A text that counts how many of its characters are searched."""

    searched = 0

    def find(self, wanted, start=0, end=None):
        end = len(self) if end is None else end
        position = super().find(wanted, start, end)
        self.searched += (end if position < 0 else position + len(wanted)) - start
        return position


@pytest.mark.parametrize("text", ['"""' * 8_500, "'a'\n" * 6_400, '"\\' + '\\"' * 10_000])
def test_the_scan_is_linear_in_unfinished_strings(text):
    counted = Counted(text)
    limits.scan(counted)
    assert 0 < counted.searched < 4 * len(text)


@pytest.mark.parametrize("text", [
    'a = "....................."', "# .......................... [[[[[[[[[[[[[[[[[[[[",
    "a = '[[[[[[[[[[[[[[[[[[[[[['", 'a = """\n.[.[.[.[.[.[.[.[.[.[.[.[.[.[.[.[.[.["."""',
    "a = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]", 'a = "\\\\"\nb = "\\""',
])
def test_dots_and_brackets_inside_strings_comments_and_numbers_do_no_harm(text):
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
