"""Rings as steps against flows: what differs has a reason, and no more than the record says."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.measured.ring_steps import outcome, table
from tests.support.cases.ring_cases import REASONS, TROUBLES, breaches, compared, drawn, reason
from tests.support.folders import MEASURED

RECORD = json.loads((MEASURED / "ring_steps.json").read_text(encoding="utf-8"))
LEAST, MOST = 0.5, 1.2
"""Steps over flows of any case; the record has 0.54 to 1.14."""


@pytest.mark.parametrize("seed", range(24))
def test_a_case_breaks_no_law_and_differs_for_a_known_reason(seed):
    case = drawn(seed)
    times = compared(case)
    assert breaches(case, times) == []
    assert reason(case, times) in REASONS
    assert LEAST < times.ratio < MOST


def test_the_record_has_a_thousand_cases_and_every_reason():
    counts = {why: row["cases"] for why, row in RECORD["by reason"].items()}
    assert RECORD["broke a law"] == []
    assert sum(counts.values()) == RECORD["cases"] >= 1000
    assert counts.keys() == REASONS.keys()
    assert min(counts.values()) > 0
    assert [row["means"] for row in RECORD["by reason"].values()] == [*REASONS.values()]
    assert LEAST < RECORD["steps over flows"]["0%"] < RECORD["steps over flows"]["100%"] < MOST


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_record_has_many_late_and_slow_ranks_and_slow_links(trouble):
    row = RECORD["by trouble"][trouble]
    assert row["cases"] == sum(row["reasons"].values()) > 150


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_cases_differ_as_the_record_says():
    """Constants of presets change and move single cases from one reason to another."""
    outcomes = [outcome(seed) for seed in range(RECORD["cases"])]
    assert [breach for each in outcomes for breach in each.broken] == []
    counts = Counter(each.why for each in outcomes)
    recorded = {why: row["cases"] for why, row in RECORD["by reason"].items()}
    assert all(abs(counts[why] - recorded[why]) <= 20 for why in REASONS)
    assert table(outcomes).keys() == recorded.keys()
    assert all(LEAST < each.ratio < MOST for each in outcomes)
