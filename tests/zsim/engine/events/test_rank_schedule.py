"""The schedule of a rank program: whichever collective ends first, every op is found once, after
all that it needs."""

import gc
import random
from dataclasses import replace

import pytest

from tests.support.folders import SCENARIOS
from zsim.engine.events.rank_schedule import RankSchedule
from zsim.ir.gc_pause import uncollected
from zsim.ir.order.happens_before import happened
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario
from zsim.scenario.plan import plan

NAMES = [
    "parity/ddp-gpt-4-accumulate-every", "parity/hsdp-gpt-2x2", "parity/zero3-gpt-4-lookahead-2",
    "memory/fsdp2-llama-3-8b-8-offload", "published/llama-3-8b-8-h100",
]


def planned(name):
    case = scenario.load(SCENARIOS / f"{name}.toml")
    return plan(case, device=case.cluster.kind).ranks[0].steady


def walked(schedule, choose):
    """The events of a schedule as a rank runs them: of the collectives at which it stands the one
    that `choose` picks ends."""
    segment, events, begun = schedule.start(), [], []
    while True:
        events += segment.events
        begun += [arrival.index for arrival in segment.arrivals]
        if not segment.frontier.arrived:
            return events, begun, segment.frontier
        stream = choose(sorted(segment.frontier.arrived))
        segment = segment.frontier.get(stream) or schedule.resume(segment.frontier, stream)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("launch_queue", [0, 7])
def test_every_op_is_found_once_after_all_that_it_comes_after(name, launch_queue):
    schedule = RankSchedule(planned(name), launch_queue=launch_queue)
    for choose in (min, max, random.Random(0).choice):
        events, begun, end = walked(schedule, choose)
        known = {len(schedule.ops)}
        for event, host_event, others in events:
            assert known.issuperset([host_event, *others])
            assert event not in known
            known.add(event)
        assert known == set(range(schedule.num_events))
        assert sorted(begun) == sorted(schedule.arrivals)
        assert schedule.next_op(end) is None


@pytest.mark.parametrize("name", NAMES)
def test_whichever_order_collectives_end_in_the_same_frontiers_are_reached(name):
    """So that ranks which diverge meet again, and a schedule stays as small as its program."""
    schedule = RankSchedule(planned(name), launch_queue=0)
    ends = [walked(schedule, choose)[2] for choose in (min, max)]
    assert ends[0] is ends[1]


@pytest.mark.parametrize("name", NAMES)
def test_what_an_op_comes_after_implies_all_that_it_waits_for(name):
    """Waits that its stream, or a later wait of the same stream, implies are left out."""
    ops = planned(name)
    schedule, order = RankSchedule(ops, launch_queue=0), happened(ops)
    for op in ops:
        others = schedule.events[op.index][2]
        assert set(others) <= {*op.waits, *range(op.index)}
        assert all(
            wait in others or any(order.before(wait, other) for other in others)
            for wait in op.waits
        )


def test_a_simulation_leaves_nothing_behind_for_the_collector_to_find():
    case = scenario.load(SCENARIOS / "published/llama-3-8b-8-h100.toml")
    gc.collect()
    with uncollected():
        SimBackend().run(case, options=RunOptions())
        assert not [kept for kept in gc.get_objects() if type(kept) is RankSchedule]


def test_who_stopped_the_collector_is_the_one_to_start_it_again():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_objects_that_the_caller_froze_stay_frozen():
    mine: list[object] = [[]]
    gc.freeze()
    with uncollected():
        pass
    assert all(each is not mine for each in gc.get_objects())  # which lists none that is frozen


@pytest.mark.parametrize(
    ("changed", "is_shared"), [({"kernels": ()}, True), ({"waits": ()}, False)]
)
def test_schedules_share_segments_where_events_follow_alike(changed, is_shared):
    ops = planned("parity/ddp-gpt-4-accumulate-every")
    first = RankSchedule(ops, launch_queue=0)
    last = max(
        op.index for op in ops
        if op.stream == "compute" and any(ops[wait].stream != "compute" for wait in op.waits)
    )
    others = tuple(replace(op, **changed) if op.index == last else op for op in ops)
    second = RankSchedule(others, launch_queue=0)
    second.share_segments([first])
    frontiers = [walked(schedule, min)[2] for schedule in (first, second)]
    assert (frontiers[0] is frontiers[1]) == is_shared
    assert second.ops == others
