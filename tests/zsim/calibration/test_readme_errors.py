"""The table of errors beside the published rows is what the rows of tests/published give today."""

from __future__ import annotations

from statistics import mean

import pytest

from tests.published import errors, nccl_fit
from tests.support.folders import PUBLISHED
from zsim.cluster.collectives.nccl.constants import CONSTANTS

README = (PUBLISHED / "README.md").read_text(encoding="utf-8")


def test_the_readmes_errors_are_those_of_the_committed_rows() -> None:
    """`python -m tests.published.errors` prints the lines anew."""
    assert [line for line in errors.lines(slow=False) if line not in README] == []


def test_the_errors_by_collective_are_those_of_the_committed_rows() -> None:
    page = README.splitlines()
    head = "| collective | size | rows | fitted | source left out | generation left out |"
    start = page.index(head) + 2
    assert page[start : page.index("", start)] == [*errors.by_collective()]


def test_the_distances_to_bands_are_those_of_the_committed_rows() -> None:
    page = README.splitlines()
    start = page.index("| source | rows | 90th percentile |") + 2
    assert page[start : page.index("", start)] == [*errors.widths()]


def test_the_constants_of_nccl_are_those_that_the_fit_gives() -> None:
    fitted = nccl_fit.fit()
    for name in ("launch_us", "reached", "reached_in_switch", "fill", "idle", "fill_of_switch"):
        assert getattr(fitted, name) == pytest.approx(getattr(CONSTANTS, name)), name


@pytest.mark.slow
def test_the_readmes_errors_of_vtrains_many_steps_are_those_of_the_committed_rows() -> None:
    assert str(errors.of_steps(errors.SLOW)) in README


def test_the_readme_has_a_line_for_each_source_and_names_the_recorded_ones() -> None:
    for label in (*errors.STEPS.values(), *errors.SIZES.values(), *errors.LEFT_OUT.values()):
        assert label in README


def test_vtrains_errors_do_not_grow_with_layers() -> None:
    """Layers do not make up for the rest of a step: rows of 12 and of 24 layers are off alike."""
    errors_of = dict[str, list[float]]()
    for row in errors.predicted(errors.SLOW, 3):
        errors_of.setdefault(row.fields["model.sizes.num_layers"], []).append(row.error)
    assert {"12", "24"} <= errors_of.keys()
    assert all(abs(mean(errors_of_depth)) < 0.015 for errors_of_depth in errors_of.values())
    assert abs(mean(errors_of["24"]) - mean(errors_of["12"])) < 0.01
