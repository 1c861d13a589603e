"""Steps of ranks that are all distinct, by columns against events: `python -m
tests.measured.distinct_ranks --out FILE`.

Random scenarios (tests.support.cases.distinct_cases), each simulated in both ways. The record
counts those that were equal to the nanosecond, and those that need events. The exit status is 1
where any time differs.
"""

from __future__ import annotations

import sys

from hypothesis.strategies import SearchStrategy

import zsim
from tests.support.cases.distinct_cases import SIMILAR, outcome, with_distinct_ranks
from tests.support.cases.in_two_ways import count


def scenarios(strategy: str) -> SearchStrategy[zsim.Scenario]:
    """Scenarios of one strategy."""
    return with_distinct_ranks((strategy,))


if __name__ == "__main__":
    sys.exit(count(__doc__, SIMILAR, scenarios, outcome, each=101))
