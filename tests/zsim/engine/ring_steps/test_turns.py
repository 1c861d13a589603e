"""Turns on a link by arithmetic: the very ends that chunks have when each turn is gone through."""

from __future__ import annotations

from collections.abc import Sequence

import simpy
from hypothesis import example, given
from hypothesis import strategies as st

from zsim.engine.ring_steps.turns import LinkInTurns

Request = tuple[int, int, int]
"""Time of a request, the ns for which the link is held in all, and the number of slices."""


def ends_by_turns(requests: Sequence[Request]) -> list[int]:
    """The end of each chunk, turn by turn. A request at the end of a turn queues behind it."""
    ends, queue, now, coming = [0] * len(requests), [], 0, list(enumerate(requests))
    while queue or coming:
        if not queue:
            now = max(now, coming[0][1][0])
        while coming and coming[0][1][0] <= now:
            number, (_, hold_ns, slices) = coming.pop(0)
            queue.append((number, hold_ns, slices, 0))
        number, hold_ns, slices, turn = queue.pop(0)
        now += hold_ns * (turn + 1) // slices - hold_ns * turn // slices
        while coming and coming[0][1][0] < now:
            later, (_, own_ns, own_slices) = coming.pop(0)
            queue.append((later, own_ns, own_slices, 0))
        if turn + 1 == slices:
            ends[number] = now
        else:
            queue.append((number, hold_ns, slices, turn + 1))
    return ends


def ends_on_a_link(requests: Sequence[Request]) -> list[int]:
    environment, ends = simpy.Environment(), [0] * len(requests)
    link = LinkInTurns(environment)

    def chunk(number: int, request: Request):
        at, hold_ns, slices = request
        yield environment.timeout(at)
        over = environment.event()
        link.carry(hold_ns, slices, over.succeed)
        yield over
        ends[number] = environment.now

    for number, request in enumerate(requests):
        environment.process(chunk(number, request))
    environment.run()
    return ends


SIZES = st.tuples(st.integers(0, 300), st.integers(1, 9))
CHUNKS = st.lists(st.tuples(st.integers(0, 400), SIZES), max_size=12)
"""Time of a request, then ns beyond one for each slice, and slices."""


@given(CHUNKS)
@example([(0, (96, 4)), (30, (98, 2))])
@example([(0, (96, 4)), (25, (96, 4)), (25, (9, 1))])
def test_chunks_end_as_they_do_turn_by_turn(chunks):
    requests = [(at, extra + slices, slices) for at, (extra, slices) in sorted(chunks)]
    assert ends_on_a_link(requests) == ends_by_turns(requests)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 99)), min_size=1))
def test_turns_of_no_time_end_and_a_link_is_never_idle_while_chunks_wait(requests):
    requests.sort()
    busy_until = 0
    for at, hold_ns, _ in requests:
        busy_until = max(busy_until, at) + hold_ns
    assert max(ends_on_a_link(requests)) == busy_until


def test_a_chunk_of_millions_of_slices_is_one_event():
    environment = simpy.Environment()
    ends = []
    LinkInTurns(environment).carry(3 * 10**9, 5 * 10**6, lambda: ends.append(environment.now))
    environment.step()
    assert ends == [3 * 10**9]
