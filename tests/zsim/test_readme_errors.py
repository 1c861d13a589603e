"""The README's table of errors is what the rows of tests/published give today."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published import errors

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_readmes_errors_are_those_of_the_committed_rows() -> None:
    """`python -m tests.published.errors` prints the lines anew."""
    assert [line for line in errors.lines(slow=False) if line not in README] == []


@pytest.mark.slow
def test_the_readmes_errors_of_vtrains_many_steps_are_those_of_the_committed_rows() -> None:
    assert str(errors.of_steps(errors.SLOW)) in README


def test_the_readme_has_a_line_for_each_source_and_names_the_recorded_ones() -> None:
    for words in (*errors.STEPS.values(), *errors.SIZES.values(), *errors.LEFT_OUT.values()):
        assert words in README
