"""Sums of gradients in a log of storages: which of them stand for a sum in place."""

from __future__ import annotations

import pytest

from zreal.tracing.gradients.engine_sums import Lives, merged
from zreal.tracing.storage_log import START, Born, Died, Entry, Summed


def lives(*entries: Entry) -> Lives:
    return merged([(START, entry) for entry in entries], in_place=True)


def test_a_sum_as_large_as_the_earlier_gradient_that_dies_there_is_that_gradient() -> None:
    log = lives(
        Born(1, 8, "mm"), Born(2, 8, "mm"), Born(3, 8, "add"), Summed(3, earlier=1), Died(1),
        Died(2), Born(4, 8, "mm"), Died(3),
    )
    kept = [
        Born(1, 8, "mm"), Born(2, 8, "mm"), Summed(3, earlier=1), Died(2), Born(4, 8, "mm"),
        Died(1),
    ]
    assert [entry for _, entry in log.entries] == kept
    assert (log.same, log.used_up) == ({3: 1}, {1, 2})


@pytest.mark.parametrize(("earlier", "deaths"), [
    (4, (1, 2)),  # a part of the sum only, as what is expanded is
    (16, (1, 2)),  # a larger storage of which the gradient was a part
    (8, (2,)),  # somebody still holds it
])
def test_a_sum_of_another_size_or_with_an_earlier_gradient_that_lives_on_is_a_storage_of_its_own(
    earlier: int, deaths: tuple[int, ...]
) -> None:
    entries = (
        Born(1, earlier, "mm"), Born(2, 8, "mm"), Born(3, 8, "add"), Summed(3, earlier=1),
        *map(Died, deaths),
    )
    log = lives(*entries)
    assert [entry for _, entry in log.entries] == list(entries)
    assert (log.same, log.used_up) == ({}, set(deaths))
