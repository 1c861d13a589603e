"""The table of seeded defects is applicable, and its record says that nearly all are caught."""

from __future__ import annotations

import json
from collections import Counter

from tests.measured.seeded.mutation_table import MUTATIONS, SUITES, SURVIVORS
from tests.support.folders import ROOT

LEAST_CAUGHT = 0.95


def test_each_defect_is_of_a_text_that_stands_once_in_its_file() -> None:
    texts = {each.file: (ROOT / each.file).read_text(encoding="utf-8") for each in MUTATIONS}
    wrong = [
        f"{each.file}: {each.old!r}" for each in MUTATIONS
        if texts[each.file].count(each.old) != 1 or each.old == each.new
    ]
    assert wrong == []
    assert {each.suite for each in MUTATIONS} == set(SUITES)
    missing = [test for tests in SUITES.values() for test in tests if not (ROOT / test).exists()]
    assert missing == []


def test_the_record_has_a_hundred_defects_of_which_nearly_all_are_caught() -> None:
    file = ROOT / "tests" / "measured" / "seeded" / "mutations.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    results = Counter(row["result"] for row in record["rows"])
    assert len(record["rows"]) >= 100
    assert set(results) <= {"caught", "caught by the limit", "survived"}
    assert results["survived"] <= (1 - LEAST_CAUGHT) * len(record["rows"])
    survivors = [row for row in record["rows"] if row["result"] == "survived"]
    assert [row["old"] for row in survivors if not row.get("reason")] == []
    assert all(suite["status"] == 0 for suite in record["suites"])
    assert len(SURVIVORS) == len(survivors)
