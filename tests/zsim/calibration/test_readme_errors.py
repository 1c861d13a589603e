"""The table of errors beside the published rows is what the rows of tests/published give today."""

from __future__ import annotations

import json
from math import log
from statistics import mean

import pytest

from tests.published import errors, nccl_fit, steps_left_out
from tests.support.folders import PUBLISHED
from zsim.calibration import accuracy
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


def table(head: str) -> list[str]:
    page = README.splitlines()
    start = page.index(head) + 2
    return page[start : page.index("", start)]


def test_the_distances_to_bands_are_those_of_the_committed_rows() -> None:
    head = "| source | rows | fitted | source left out | generation left out |"
    assert table(head) == [*errors.widths()]


def test_bands_of_sources_left_out_are_worth_their_width() -> None:
    """Nine of ten in the band and not much more. vTrain's collectives are nearer, and its steps
    without its host further off. Model sizes of the one source that was fitted are nearer too.
    The page tells all three."""
    unseen = {line.split("|")[1]: float(line.split("|")[4]) for line in errors.widths()}
    assert unseen.pop(" VIA-Research/vTrain ") < 0.7
    unseen |= {
        line: float(line.split("|")[-2]) for line in errors.left_out() if "generation" in line
    }
    assert len(unseen) == 3
    assert all(0.7 <= share <= 1.1 for share in unseen.values()), unseen


def test_the_errors_of_steps_left_out_are_those_of_the_record() -> None:
    """`python -m tests.published.steps_left_out` makes the record anew, in two minutes."""
    head = "| left out | rows | median | mean | 95th percentile | largest | in band | distance |"
    assert table(head) == [*errors.left_out()]


def test_the_record_is_of_the_rows_and_constants_of_today() -> None:
    kept = json.loads(steps_left_out.RECORD.read_text(encoding="utf-8"))
    assert kept["of"] == steps_left_out.fingerprint(), f"run {kept['command']}"


@pytest.mark.slow
def test_steps_left_out_are_off_by_what_the_record_says() -> None:
    for what, predict in steps_left_out.LEFT_OUT.items():
        known = {row.line: row.error for row in steps_left_out.recorded()[what]}
        assert {row.line: row.error for row in predict()} == pytest.approx(known, abs=0.002)


def test_growth_with_nodes_is_within_a_quarter_of_the_measured() -> None:
    """MPT 7B on 2, 4 and 8 nodes, a step's growth per doubling; the page has both."""
    rows = sorted(
        (row for row in errors.predicted("mpt_llm_foundry.csv") if row.nodes > 1),
        key=lambda row: row.nodes,
    )
    assert [row.nodes for row in rows] == [2, 4, 8]
    predicted, measured = (
        log(last / first) / 2 for first, last in (
            (rows[0].predicted, rows[2].predicted), (rows[0].measured, rows[2].measured)
        )
    )
    assert 0.8 <= predicted / measured <= 1.25
    told = f"grows by {predicted:.2%} for each doubling, measured {measured:.2%}"
    assert told.replace("%", " %") in " ".join(README.split())


def test_distances_and_slopes_of_steps_are_those_of_the_page() -> None:
    page = " ".join(README.split())
    assert f"it is {errors.distances('mpt_llm_foundry.csv'):.2f} (llm-foundry)" in page
    others = [row for file in errors.STEPS if file != errors.SLOW for row in errors.predicted(file)]
    by_hidden = accuracy.by_hidden(others)
    assert by_hidden is not None
    assert f"and of {by_hidden.slope:.3f} over the {by_hidden.n} that are not vTrain's" in page


def test_the_constants_of_nccl_are_those_that_the_fit_gives() -> None:
    fitted = nccl_fit.fit()
    for name in ("launch_us", "idle"):
        assert getattr(fitted, name) == pytest.approx(getattr(CONSTANTS, name)), name


@pytest.mark.slow
def test_the_readmes_errors_of_vtrains_many_steps_are_those_of_the_committed_rows() -> None:
    assert str(errors.of_steps(errors.SLOW)) in README
    assert f"{errors.distances(errors.SLOW):.2f} (vTrain)" in README
    by_hidden = accuracy.by_hidden([row for file in errors.STEPS for row in errors.predicted(file)])
    assert by_hidden is not None
    assert f"a slope of {by_hidden.slope:.3f} over {by_hidden.n} steps" in " ".join(README.split())


def test_the_readme_has_a_line_for_each_source() -> None:
    for label in (*errors.STEPS.values(), *errors.SIZES.values()):
        assert label in README


def test_vtrains_errors_do_not_grow_with_layers() -> None:
    """Layers make up for little of the rest, though nothing was fitted to the rows.

    What Megatron does once in a micro-batch is in no scenario, so rows of 12 layers are too short.
    """
    errors_of = dict[str, list[float]]()
    for row in errors.predicted(errors.SLOW, 3):
        errors_of.setdefault(row.fields["model.sizes.num_layers"], []).append(row.error)
    assert {"12", "24"} <= errors_of.keys()
    few, many = (mean(errors_of[layers]) for layers in ("12", "24"))
    assert max(map(abs, (few, many))) < 0.07
    page = " ".join(README.split()).replace(" %", "%")
    assert f"{-few:.1%} short, those of 24 {many:.1%} long" in page
