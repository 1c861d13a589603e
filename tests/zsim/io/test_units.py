"""Units: exact integers from text, refusals that say how to mend, and text that parses back."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.io.units import (
    OPERATORS,
    UnitError,
    format_bytes,
    format_rate,
    format_time,
    holds,
    parse_bytes,
    parse_flop_rate,
    parse_fraction,
    parse_rate,
    parse_time,
    split_comparison,
)


@pytest.mark.parametrize(("text", "nbytes"), [
    ("80 GiB", 80 * 2**30), ("80GB", 80 * 10**9), (" 36,012,348 B ", 36_012_348), ("1.5 KiB", 1536),
    ("0 B", 0), ("9007199254740993 B", 9007199254740993),
])
def test_sizes_are_exact_integers(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(("text", "rate"), [
    ("400 Gbit/s", 50 * 10**9), ("200 Gbit/s", 25 * 10**9), ("25 GB/s", 25 * 10**9),
    ("3.35 TB/s", 3_350_000_000_000),
])
def test_rates_are_bytes_per_second(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "ns"),
    [("5 us", 5000), ("5 µs", 5000), ("1 ns", 1), ("2.5 ms", 2_500_000), ("3 s", 3 * 10**9)],
)
def test_times_are_nanoseconds(text: str, ns: int) -> None:
    assert parse_time(text) == ns


def test_flop_rates_are_operations_per_second() -> None:
    assert parse_flop_rate("19.5 TFLOP/s") == 19_500_000_000_000


@pytest.mark.parametrize(
    ("text", "share"), [("10 %", 0.1), ("0.1", 0.1), ("100%", 1.0), ("67.5 %", 0.675)]
)
def test_shares_are_fractions_of_one(text: str, share: float) -> None:
    assert parse_fraction(text) == share


def test_a_bare_prefix_is_refused_with_what_was_expected_found_and_how_to_mend_it() -> None:
    with pytest.raises(UnitError) as refused:
        parse_bytes("80G")
    assert str(refused.value) == (
        "quantity: expected a number of B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        ' (as "80 GiB"), found "80G"; say which is meant: 80 GB or 80 GiB'
    )


def test_a_bare_rate_could_be_bits_or_bytes() -> None:
    with pytest.raises(UnitError, match=r"400 GB/s, 400 GiB/s, 400 Gbit/s or 400 Gibit/s$"):
        parse_rate("400G")


@pytest.mark.parametrize("text", [
    *(
        "", "GiB", "80", "-1 GiB", "nan GiB", "inf B", "1e9 B", "80 gib", "80 GiB GiB",
        "80 GB/s", "٣ GiB", "9" * 99,
    ),
    *("1,5 GiB", "1,,,5___0 B", "12,34 B", "1_ B", "1_,000 B"),
])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_bytes(text)


def test_thousands_may_be_set_apart() -> None:
    assert parse_bytes("1,234,567 B") == parse_bytes("1_234_567 B") == 1234567


@pytest.mark.parametrize("text", ["10", "1", "1.5"])
def test_a_share_without_a_unit_is_below_one(text: str) -> None:
    with pytest.raises(UnitError, match="a share with its unit"):
        parse_fraction(text)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused_and_nothing_else(text: str) -> None:
    for parse in (parse_bytes, parse_rate, parse_time, parse_fraction, parse_flop_rate):
        with contextlib.suppress(UnitError):
            assert parse(text) >= 0


@given(st.integers(0, 2**60))
def test_bytes_for_people_parse_back_within_their_rounding(nbytes: int) -> None:
    text = format_bytes(nbytes)
    unit = parse_bytes(f"1 {text.split()[1]}")
    assert abs(parse_bytes(text) - nbytes) * 200 <= unit + 200


@given(st.integers(0, 10**15))
def test_times_for_people_parse_back_within_their_rounding(ns: int) -> None:
    text = format_time(ns)
    unit = parse_time(f"1 {text.split()[1]}")
    assert abs(parse_time(text) - ns) * 2000 <= unit + 2000


@given(st.integers(0, 10**15))
def test_rates_for_people_parse_back_within_their_rounding(rate: int) -> None:
    assert abs(parse_rate(format_rate(rate)) - rate) <= 50_000_001


@given(st.integers(0, 10**18), st.integers(0, 999))
def test_no_digit_is_lost_on_the_way(whole: int, thousandths: int) -> None:
    exact = (Fraction(whole) + Fraction(thousandths, 1000)) * 1000
    assert parse_time(f"{whole}.{thousandths:03} us") == exact


@pytest.mark.parametrize(("text", "parts"), [
    ("<= 70 GiB", ("<=", "70 GiB")), ("<70 GiB", ("<", "70 GiB")), (" >= 5 ms ", (">=", "5 ms")),
    ("> 1", (">", "1")), ("== 9", ("==", "9")), ("36 B", ("", "36 B")),
])
def test_a_comparison_is_an_operator_and_a_quantity(text: str, parts: tuple[str, str]) -> None:
    assert split_comparison(text) == parts


def test_the_operators_compare_as_they_read() -> None:
    truths = {operator: [holds(operator, left, 2) for left in (1, 2, 3)] for operator in OPERATORS}
    assert truths == {
        "<=": [True, True, False], ">=": [False, True, True], "==": [False, True, False],
        "<": [True, False, False], ">": [False, False, True],
    }
