"""Random scenarios through all laws, with what a sweep of them must have met.

`tests.measured.random_scenarios` sweeps over ten thousand, and asks for each situation a hundred
times.
"""

from __future__ import annotations

from collections import Counter
from itertools import cycle

import pytest

from tests.support.cases.situations import FAULTS, LISTED, SEVERAL, sweep, too_seldom

EACH = 4
SELDOM = 4
"""Situations that so few scenarios may miss: by chance, and by how hypothesis draws them."""


def test_random_scenarios_obey_all_laws_and_meet_most_situations() -> None:
    pairs = list(zip(cycle(SEVERAL), FAULTS, strict=False))
    met, wrong = sweep(EACH, pairs)
    assert wrong == []
    assert met["scenarios"] >= EACH * len(pairs) - len(pairs)
    assert len(too_seldom(met, least=1)) <= SELDOM, too_seldom(met, least=1)


@pytest.mark.quality
def test_a_sweep_is_red_that_met_a_situation_too_seldom() -> None:
    met = Counter(dict.fromkeys(LISTED, 100))
    assert too_seldom(met, least=100) == {}
    assert too_seldom(met - Counter({"tie": 1}), least=100) == {"tie": 99}
    del met["hsdp"]
    assert too_seldom(met, least=1) == {"hsdp": 0}
