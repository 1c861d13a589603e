"""Verdicts on published runs: what ran has room, and why what failed is not said to lack it."""

from __future__ import annotations

import pytest

from tests.published import errors, predictions, room
from tests.published.convert import published
from tests.published.predictions import GIB
from tests.support.folders import PUBLISHED
from zsim.memory.non_torch import total

README = (PUBLISHED / "README.md").read_text(encoding="utf-8")
FAST = [file for file in errors.STEPS if file != errors.SLOW]


@pytest.mark.parametrize("file", [
    *FAST, pytest.param(errors.SLOW, marks=pytest.mark.slow),
])
def test_the_verdicts_of_the_readme_are_those_of_the_committed_rows(file):
    """`python -m tests.published.room` prints them."""
    numbers = room.counts(room.ran(file))
    assert numbers["OOM"] == 0
    assert room.line(f"ran: {errors.STEPS[file].partition(':')[0]}", numbers) in README


def test_some_of_vtrains_many_rows_have_room_too():
    assert set(room.counts(room.ran(errors.SLOW, every=20))) == {"FITS"}


def test_every_row_that_failed_is_in_the_readme():
    assert room.line("failed: nanotron", room.counts(room.failed())) in README


def test_a_row_that_failed_is_cell_by_cell_a_row_that_ran():
    """Whatever ended it, it was not for want of memory."""
    measured = {"status", "mfu_pct", "tokens_per_s_per_gpu", "tokens_per_s_total", "peak_mem_gb",
                "mfu_pct_recomputed", "step_time_s_derived"}
    cells = {status: [
        {key: text for key, text in row.items() if key not in measured}
        for row in published("ultrascale_playbook_sweep.csv")
        if (row["status"] == "ok") is (status == "ran")
    ] for status in ("ran", "failed")}
    on_few, on_many = cells["failed"]
    assert (on_few in cells["ran"], on_many in cells["ran"]) == (True, False)


def test_the_other_row_that_failed_nearly_fills_its_device_by_its_twins():
    """The line through the measured peaks of one and two sequences, and what lies outside torch."""
    *_, on_many = room.failed()
    assert (on_many.batch.micro_batch, on_many.world_size) == (4, 64)
    few, more = (predictions.rows()[name].peak for name in ("n3", "n4"))
    verdict = room.verdict(on_many)
    by_twins, beyond = few + 3 * (more - few), total(verdict.outside)
    assert by_twins == pytest.approx(77.2)
    assert by_twins * GIB + beyond.high > verdict.capacity.low
    assert verdict.reserved_bytes / GIB == pytest.approx(62.4, abs=0.1)
