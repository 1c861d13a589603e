"""Reasons for the length of a step, on programs whose times can be seen at a glance. Ops are also
slowed down by more than their work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings

from tests.support.folders import SCENARIOS
from tests.support.programs.hand_made import TWO_BY_TWO, Plain, all_reduce, compute, gather, program
from zsim.analysis.causes.critical_path import explain
from zsim.analysis.causes.why import LONGER, SHARED, name
from zsim.analysis.simulated_step import explain_step
from zsim.cli.reports import time_report
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import Execution
from zsim.engine.simulate import simulate
from zsim.engine.simulate_step import simulate_step
from zsim.engine.timeline import Delays
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Op
from zsim.ir.program import Program, RankProgram
from zsim.runs.backend import RunOptions
from zsim.runs.figures.metrics import figures
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario
from zsim.scenario.plan import plan, planned
from zsim.testing.strategies import scenarios


def reasons(
    step: Program, costs: Plain | None = None, *, rank: int | None = None
) -> dict[str, dict[str, int]]:
    """Exposed time of each collective by reason; they add up."""
    why = explain(step, simulate(step, costs=costs or Plain()), rank=rank)
    assert all(
        sum(ns for _, ns in each.parts) == each.exposed_ns and all(ns > 0 for _, ns in each.parts)
        for each in why.exposed
    )
    assert sum(why.by_reason.values()) == sum(each.exposed_ns for each in why.exposed)
    return {name(each.op): dict(each.parts) for each in why.exposed}


over_replicas = partial(program, mesh=TWO_BY_TWO)
"""The same on two groups of two ranks, so that there are two communicators."""


def test_each_exposed_collective_says_what_it_waited_for() -> None:
    """a's gather opens the step, when there is no compute yet. b's runs beside a and outlasts it.
    c's waits in the queue behind b's while a computes for 20. d's waits for a dependency that
    computes for 5."""
    step = program(
        gather(0, "a", 10), compute(1, "a", 20, 0), gather(2, "b", 30, 0), compute(3, "b", 5, 2),
        gather(4, "c", 40), compute(5, "c", 5, 4), gather(6, "d", 7, 5), compute(7, "d", 1, 6),
    )
    why = explain(step, simulate(step, costs=Plain()))
    by_name = {
        name(each.op): (each.exposed_ns, each.reason, each.waited_for) for each in why.exposed
    }
    assert by_name == {
        "all_gather a": (10, LONGER, ""), "all_gather b": (10, LONGER, "all_gather a"),
        "all_gather c": (35, "its communicator's queue", "all_gather b"),
        "all_gather d": (7, "a dependency", "forward c"),
    }
    assert reasons(step) == {
        "all_gather a": {LONGER: 10}, "all_gather b": {LONGER: 10},
        "all_gather c": {"its communicator's queue": 20, LONGER: 15},
        "all_gather d": {"a dependency": 5, LONGER: 2},
    }
    assert why.by_reason == {LONGER: 37, "its communicator's queue": 20, "a dependency": 5}
    assert why.step_ns == 93
    assert not why.host_bound


def test_a_collective_that_is_issued_late_beside_long_compute_waited_for_the_host() -> None:
    """Forward runs from 0 to 100, and a gather of 50 is issued at 95. So 45 are exposed; 50 would
    have been hidden in 100."""
    step = program(compute(0, "a", 100), gather(1, "b", 50))
    assert reasons(step, Plain(late={1: 95})) == {"all_gather b": {"the host": 45}}
    step = program(compute(0, "a", 30), gather(1, "b", 50))
    assert reasons(step, Plain(late={1: 25})) == {"all_gather b": {"the host": 25, LONGER: 20}}


def test_a_collective_waits_for_a_dependency_also_when_other_compute_runs_beside_it() -> None:
    """A gather of 50 waits for a, which ends at 100; 1 ns of b runs beside it. Issued 3 ns later
    while c computes, it waits for the host in those."""
    step = program(compute(0, "a", 100), gather(1, "b", 50, 0), compute(2, "b", 1))
    assert reasons(step) == {"all_gather b": {"a dependency": 49}}
    step = program(compute(0, "a", 100), compute(1, "c", 9), gather(2, "b", 50, 0))
    assert reasons(step, Plain(late={2: 103})) == {
        "all_gather b": {"a dependency": 41, "the host": 3}
    }


def test_a_collective_that_is_issued_while_its_dependency_runs_never_waited_for_the_host() -> None:
    """A gather of 200 waits for a, which ends at 100, and is issued at 20 or at once. A host that
    costs nothing changes nothing."""
    step = program(compute(0, "a", 100), gather(1, "b", 200, 0))
    for issued in (0, 20, 100):
        assert reasons(step, Plain(late={1: issued})) == {
            "all_gather b": {"a dependency": 100, LONGER: 100}
        }
    step = program(compute(0, "a", 100), compute(1, "c", 50), gather(2, "b", 200, 0))
    assert reasons(step, Plain(late={2: 130})) == {
        "all_gather b": {"a dependency": 100, "the host": 30, LONGER: 50}
    }


@pytest.mark.parametrize(
    "path", ["parity/ddp-gpt-4", "memory/zero2-gpt-small-4", "parity/zero1-gpt-4-accumulate-last"]
)
def test_the_host_is_no_reason_where_one_that_costs_nothing_changes_nothing(path: str) -> None:
    asked = scenario.load(SCENARIOS / f"{path}.toml")
    planned = plan(asked, device=asked.cluster.kind)
    free = replace(asked.cluster.overheads, issue_kernel=0, issue_collective=0, issue_hook=0)
    clusters = asked.cluster, replace(asked.cluster, overheads=free)
    late, at_once = (
        explain(
            planned, simulate_step(planned, costs=Costs(cluster=cluster, execution=asked.executed))
        )
        for cluster in clusters
    )
    assert late.exposed_ns == at_once.exposed_ns
    assert late.by_reason == at_once.by_reason
    assert "the host" not in late.by_reason


def test_what_is_ahead_of_a_collective_that_something_else_holds_longer_is_no_reason() -> None:
    """d waits for c, which is issued when b's gather is long over. The copy behind that gather, on
    d's stream, is no matter of d's."""
    behind = Op(index=2, kind="copy", unit="b", stream="all_gather", waits=(1,))
    step = program(
        compute(0, "a", 90), gather(1, "b", 40), behind, compute(3, "c", 10), gather(4, "d", 30, 3)
    )
    assert reasons(step) == {"all_gather d": {"a dependency": 30}}
    long = Op(
        index=2, kind="copy", unit="b", stream="all_gather", waits=(1,),
        kernels=(Kernel("copy", 60, 0, "float32"),),
    )
    step = program(
        compute(0, "a", 90), gather(1, "b", 40), long, compute(3, "c", 10), gather(4, "d", 30)
    )
    assert reasons(step) == {"all_gather d": {"its stream": 30}}


def test_compute_hides_one_collective_of_a_communicator_and_not_two() -> None:
    """Three gathers of 50 wait for a computation of 120. Two would be hidden, and 20 of the third.
    The second also waits for the first."""
    step = program(
        compute(0, "a", 120), gather(1, "b", 50, 0), gather(2, "c", 50, 0), gather(3, "d", 50, 0)
    )
    assert reasons(step) == {
        "all_gather b": {"a dependency": 50}, "all_gather c": {"a dependency": 50},
        "all_gather d": {"a dependency": 20, LONGER: 30},
    }


def test_what_a_communicator_hides_elsewhere_is_no_room_for_what_comes_after() -> None:
    """Layers that are alike, each gathered during the one before it: the communicator never rests,
    so nothing could begin earlier."""
    layers = [
        op
        for index in range(1, 9, 2)
        for op in (
            gather(index, f"{index}", 30, max(0, index - 2)),
            compute(index + 1, f"{index}", 20, max(0, index - 2)),
        )
    ]
    assert {
        reason for parts in reasons(program(gather(0, "a", 30), *layers)).values()
        for reason in parts
    } == {LONGER}


def test_a_collective_that_another_rank_holds_up_says_so() -> None:
    """Rank 1 arrives at 60. Rank 0 was there at 20, and could have hidden 40 more of its 80 under
    b, which ends at 120."""
    ops = [(compute(0, "a", ns), gather(1, "c", 80, 0), compute(2, "b", 100)) for ns in (20, 60)]
    ranks = tuple(RankProgram(construction=(), first=(), steady=each) for each in ops)
    step = Program(mesh=Mesh(dp_shard=2), ranks=ranks, assignment=(0, 1))
    assert reasons(step, rank=0) == {"all_gather c": {"another rank": 20}}


def test_two_collectives_that_share_a_link_are_exposed_for_that() -> None:
    """60 ns each over one link take 120 together, 20 more than the compute over them; each alone is
    hidden. The last has the time."""
    step = over_replicas(compute(0, "a", 100), gather(1, "b", 60), all_reduce(2, "c", 60))
    assert reasons(step) == {"all_reduce c": {SHARED: 20}}
    short = over_replicas(compute(0, "a", 40), gather(1, "b", 60), all_reduce(2, "c", 60))
    assert reasons(short) == {"all_reduce c": {SHARED: 60, LONGER: 20}}


def test_a_queue_that_is_long_since_those_ahead_share_their_links_is_a_shared_link() -> None:
    """b and c take 120 instead of 60, so d comes 60 later, when a that it was to run beside is
    over. Of its 30 none would be exposed."""
    ahead = gather(1, "b", 60), all_reduce(2, "c", 60)
    step = over_replicas(compute(0, "a", 120), *ahead, gather(3, "d", 30), compute(4, "d", 10, 3))
    assert reasons(step) == {"all_gather d": {SHARED: 30}}
    alone = explain(step, simulate(step, costs=Plain(), contention=False))
    assert alone.exposed == ()
    longer = over_replicas(compute(0, "a", 120), *ahead, gather(3, "d", 80), compute(4, "d", 10, 3))
    assert reasons(longer) == {"all_gather d": {SHARED: 60, "its communicator's queue": 20}}


def test_what_a_queue_lost_to_shared_links_is_exposed_once() -> None:
    """d is exposed for 30 of the 60 that b lost, e for 20 beside d's own 10 of compute. f would
    have been exposed for its other 10 as well.

    Without sharing the step takes 140 instead of 190: these 50 are shown.
    """
    ops = (
        compute(0, "a", 120), gather(1, "b", 60), all_reduce(2, "c", 60), gather(3, "d", 30),
        compute(4, "d", 10, 3), gather(5, "e", 30),
    )
    step = over_replicas(*ops, compute(6, "e", 10, 5))
    with_others, alone = (
        simulate(step, costs=Plain(), contention=contention).step_time_ns
        for contention in (True, False)
    )
    assert (with_others, alone) == (190, 140)
    assert reasons(step) == {"all_gather d": {SHARED: 30}, "all_gather e": {SHARED: 20}}
    further = over_replicas(
        *ops, compute(6, "e", 10, 5), gather(7, "f", 40), compute(8, "f", 10, 7)
    )
    assert reasons(further)["all_gather f"] == {SHARED: 10, "its communicator's queue": 20}


def test_a_queue_hands_on_what_it_lost_only_as_far_as_it_alone_held_the_next() -> None:
    """d waits until 110 for x, which is as long without sharing. b, over at 120 instead of 60,
    holds it for 10 of its 30."""
    ahead = compute(0, "x", 110), gather(1, "b", 60), all_reduce(2, "c", 60)
    step = over_replicas(*ahead, gather(3, "d", 30, 0), compute(4, "y", 10), compute(5, "d", 10, 3))
    assert reasons(step) == {"all_gather d": {SHARED: 10, LONGER: 20}}
    hidden = over_replicas(
        *ahead, gather(3, "d", 30, 0), compute(4, "y", 100), gather(5, "e", 80),
        compute(6, "e", 10, 5),
    )
    assert reasons(hidden) == {"all_gather e": {SHARED: 10, "its communicator's queue": 10}}
    apart = explain(hidden, simulate(hidden, costs=Plain(), contention=False))
    assert [(name(each.op), each.parts) for each in apart.exposed] == [
        ("all_gather e", (("its communicator's queue", 10),))
    ]


def test_of_collectives_that_are_exposed_at_once_the_one_that_ends_last_has_the_time() -> None:
    """Over links of their own: the all-reduce is over at 30 and the gather at 50, of which 10 are
    hidden."""
    step = over_replicas(compute(0, "a", 10), all_reduce(1, "b", 30), gather(2, "c", 50))
    why = explain(step, simulate(step, costs=Plain(), contention=False))
    assert [(name(each.op), each.exposed_ns) for each in why.exposed] == [("all_gather c", 40)]
    turned = over_replicas(compute(0, "a", 10), all_reduce(1, "b", 50), gather(2, "c", 30))
    why = explain(turned, simulate(turned, costs=Plain(), contention=False))
    assert [(name(each.op), each.exposed_ns) for each in why.exposed] == [("all_reduce b", 40)]


def test_what_sharing_costs_a_step_that_communication_bounds_is_said_to_be_shared_links() -> None:
    """HSDP over 8 p4d, whose nodes share their NICs between the gathers of 16 ranks and the
    all-reduces of 4."""
    asked = scenario.parse(
        b"""
model.preset = "mpt-1b"
batch = { micro_batch = 1 }
cluster = { preset = "p4d", nodes = 8 }
strategy = { name = "hsdp", dp_shard = 16, dp_replicate = 4 }
precision = { parameters = "bf16", reduce = "bf16" }
execution = { interference = false }
""",
        where="hsdp.toml",
    )
    step, costs = plan(asked, device="cuda"), Costs(cluster=asked.cluster, execution=asked.executed)
    with_others, alone = (
        simulate(step, costs=costs, contention=contention) for contention in (True, False)
    )
    longer = with_others.step_time_ns - alone.step_time_ns
    shared = explain(step, with_others).by_reason[SHARED]
    assert longer > 0.1 * alone.step_time_ns
    assert abs(shared / longer - 1) < 0.1
    assert SHARED not in explain(step, alone).by_reason


def test_the_critical_path_goes_from_the_first_op_to_the_last_without_a_gap() -> None:
    step = program(
        gather(0, "a", 10), compute(1, "a", 20, 0), gather(2, "b", 30, 0), compute(3, "b", 5, 2)
    )
    why = explain(step, simulate(step, costs=Plain()))
    assert [(name(link.op), link.start_ns, link.end_ns) for link in why.critical_path] == [
        ("all_gather a", 0, 10), ("all_gather b", 10, 40), ("forward b", 40, 45),
    ]
    assert why.critical_path[0].then == "all_gather b waits for it"
    assert why.critical_path[-1].then == "the step is over"


@pytest.mark.parametrize("path", [
    "overlap/zero3-llama-3-8b-8-lookahead-0", "published/llama-3-8b-8-h100",
    "parity/fsdp2-gpt-4", "parity/fsdp1-gpt-2x2", "parity/hsdp-gpt-2x2", "parity/ddp-gpt-4",
])
def test_exposed_time_is_what_the_run_says_and_the_critical_path_is_as_long_as_the_step(
    path: str
) -> None:
    asked = scenario.load(SCENARIOS / f"{path}.toml")
    planned = plan(asked, device=asked.cluster.kind)
    costs = Costs(cluster=asked.cluster, execution=asked.executed)
    timeline = simulate_step(planned, costs=costs)
    run = SimBackend().run(asked, options=RunOptions())
    by_rank = [explain(planned, timeline, rank=rank).by_reason for rank in timeline.ranks]
    assert (
        max(sum(by_reason.values()) for by_reason in by_rank)
        == figures(run, asked).exposed_communication_ns
    )
    why = explain(planned, timeline)
    links = why.critical_path
    assert links[-1].end_ns == why.step_ns
    assert all(
        earlier.end_ns <= later.start_ns for earlier, later in zip(links, links[1:], strict=False)
    )


@given(scenarios())
@settings(max_examples=30, deadline=None)
def test_the_ops_of_the_critical_path_and_what_they_waited_for_are_the_whole_step(
    case: scenario.Scenario
) -> None:
    step = planned(case)
    why = explain_step(case, step.program, time_report.timed(step).timeline)
    links = why.critical_path
    assert sum(link.waited_ns + link.end_ns - link.start_ns for link in links) == why.step_ns
    assert all(link.waited_for for link in links if link.waited_ns)
    assert all(after.start_ns - link.end_ns == after.waited_ns for link, after in pairwise(links))


def test_an_op_that_takes_no_time_does_not_end_the_idle_time_of_the_device() -> None:
    """b is allocated at 30, when its gather is over. It is computed from 35 on, when the host has
    issued it. So 20 and 5 are idle."""
    ready = Op(index=2, kind="alloc", unit="b", stream="compute", waits=(1,))
    step = program(compute(0, "a", 10), gather(1, "b", 30), ready, compute(3, "b", 65, 1))
    assert reasons(step) == {"all_gather b": {LONGER: 20}}
    why = explain(step, simulate(step, costs=Plain(late={3: 35})))
    assert (why.step_ns, why.host_bound_ns) == (100, 25)


def test_a_step_that_waits_for_the_host_says_so() -> None:
    step = program(*(compute(index, "a", 1) for index in range(10)))
    why = explain(step, simulate(step, costs=Plain(issue=5)))
    assert (why.step_ns, why.host_bound_ns, why.host_bound) == (51, 5 + 9 * 4, True)


@pytest.mark.parametrize(("issue", "is_bound"), [(1, False), (2, True)])
def test_a_step_is_bound_by_the_host_from_a_tenth_of_it_on(issue: int, is_bound: bool) -> None:
    """Two computations of 7: the second is issued 1 or 2 ns after the first is over. 1 of 15 is
    below a tenth, 2 of 16 above."""
    step = program(compute(0, "a", 7), compute(1, "b", 7))
    why = explain(step, simulate(step, costs=Plain(late={1: 7 + issue})))
    assert (why.step_ns, why.host_bound_ns, why.host_bound) == (14 + issue, issue, is_bound)


def test_pauses_of_the_trainer_stop_host_and_device() -> None:
    """Two micro-batches of 100, with 30 before each, the first on an idle device; a slow host
    pauses before it issues the second."""
    step = program(compute(0, "a", 100), compute(1, "a", 100, micro_batch=1))
    paused = Execution(micro_batch_overhead_ns=30)
    assert simulate_step(step, costs=Plain(execution=paused)).step_time_ns == 2 * (30 + 100)
    slow = simulate_step(step, costs=Plain(issue=500, execution=paused))
    assert slow.ranks[0].issued == [500, 1030]
    assert slow.step_time_ns == 1030 + 30 + 100


def test_nothing_is_lost_in_a_pause() -> None:
    """A gather of 40 beside a pause of 30 and kernels of 100: a quarter is lost of the 10 in which
    both run."""
    step = program(gather(0, "a", 40), compute(1, "b", 100))
    paused = Execution(micro_batch_overhead_ns=30)
    assert simulate_step(step, costs=Plain(share=0.25, execution=paused)).step_time_ns == round(
        30 + 100 + 10 / 4
    )
    long = Execution(micro_batch_overhead_ns=50)
    assert simulate_step(step, costs=Plain(share=0.25, execution=long)).step_time_ns == 50 + 100


def test_delays_of_one_op_are_its_own() -> None:
    step = program(compute(0, "a", 10), compute(1, "b", 10))
    times = simulate(step, costs=Plain(), delays=[Delays({0: 5}, {0: 40})]).ranks[0]
    assert (times.starts, times.ends) == ([0, 40], [15, 50])
