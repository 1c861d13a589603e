"""The page for users: its examples are tests that pass."""

from __future__ import annotations

import re

import pytest

from tests.support.folders import ROOT
from tests.zreal.testing.conftest import RankSessions
from zreal.processes.fork_server import killed_by

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo

PAGE = (ROOT / "zreal/testing/README.md").read_text(encoding="utf-8")


def test_the_examples_of_the_page_pass(sessions: RankSessions) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

    assert sessions.outcomes("\n".join(examples)) == {
        "test_every_rank_holds_half_and_learns_the_same": "passed",
        "test_a_reduction_is_a_sum": "passed",
        "test_each_rank_returns_its_value": "passed",
        "test_my_wrapping_trains_as_one_process[2-ranks]": "passed",
        "test_my_wrapping_trains_as_one_process[3-ranks]": "passed",
    }


def test_the_page_names_every_attribute_of_the_fixture_and_the_words_of_reports() -> None:
    from zreal.testing import Rank

    own = {name for name in dir(Rank) if not name.startswith("_")}
    table = PAGE[PAGE.index("| `rank` has") : PAGE.index("**Fixtures.**")]
    assert {name for name in own if f"`{name}" in table} == own
    assert killed_by(9).startswith("killed by SIGKILL")
