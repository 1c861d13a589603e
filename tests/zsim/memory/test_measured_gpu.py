"""Bytes that an H200 reserved (tests/measured/gpu.json) against what is predicted of them now."""

from __future__ import annotations

import json

import pytest

import zsim
from tests.support.folders import MEASURED
from zsim.analysis.simulated_step import add_caches

ROWS = {
    name: row
    for name, row in json.loads((MEASURED / "gpu.json").read_text())["memory"]["measured"].items()
    if "reserved_bytes" in row
}
ANOTHER_STREAM = 0.006
"""Share by which blocks that other streams keep for a while change the layout; the largest is 0.55
% on five rows."""


@pytest.mark.parametrize("name", ROWS)
def test_what_a_gpu_reserved_is_what_is_predicted(name: str) -> None:
    row = ROWS[name]
    scenario = zsim.Scenario(**row["scenario"])
    run = zsim.simulate(scenario, ranks=(0,))
    (rank,) = add_caches(scenario, run.record, scenario.cluster).ranks
    assert rank.cache is not None
    growth = rank.cache.peak_bytes - rank.cache.start_bytes
    assert row["peak_bytes"] - row["start_bytes"] == growth
    # inputs and buffers, up to one block, are counted whole by one side and by shape on the other
    assert abs(row["start_bytes"] - rank.cache.start_bytes) <= 2**15
    assert rank.cache.reserved_bytes == pytest.approx(row["reserved_bytes"], rel=ANOTHER_STREAM)
