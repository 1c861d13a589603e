"""Steps without most of their equal layers against whole ones: `python -m
tests.measured.equal_layers --out FILE`.

Random scenarios (tests.support.cases.layer_cases), each simulated in both ways. The record counts
those that were equal to the nanosecond, and those in which all layers were simulated. The exit
status is 1 where any time differs.
"""

from __future__ import annotations

import sys

from hypothesis.strategies import SearchStrategy

import zsim
from tests.support.cases.in_two_ways import count
from tests.support.cases.layer_cases import RECURRING, outcome, with_layers


def scenarios(strategy: str) -> SearchStrategy[zsim.Scenario]:
    """Scenarios of one strategy."""
    return with_layers((strategy,))


if __name__ == "__main__":
    sys.exit(count(__doc__, RECURRING, scenarios, outcome, each=143))
