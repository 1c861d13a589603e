"""Random fault plans, in two modes.

Safety: with faults at any time nothing wrong is said. Liveness: where faults only delay, or stop,
the step makes progress.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import zsim
from tests.support.faulty.fault_modes import FATAL, live, safe, simulated
from zsim.engine.faults.fault import FAULT_KINDS
from zsim.testing import strategies
from zsim.testing.strategies.faults import DELAYING, MOST_FAULTS

QUIET = settings(max_examples=2000, phases=[Phase.generate, Phase.shrink], database=None)
EXAMPLES = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FATAL_KINDS = tuple(kind.kind for kind in FATAL)
SMALL = zsim.Scenario(
    model={"preset": "mlp-tiny"}, batch={"micro_batch": 2},
    cluster={"preset": "pcie-box", "nodes": 2}, strategy={"name": "fsdp2"},
)
PAIR = SMALL.with_(cluster={"preset": "cpu-gloo", "nodes": 1, "ranks": 2})


@EXAMPLES
@given(strategies.scenarios(), st.data())
def test_safety_nothing_wrong_is_said_with_faults_at_any_time(
    scenario: zsim.Scenario, data: st.DataObject
) -> None:
    plan = data.draw(strategies.fault_plans(scenario))
    safe(scenario.with_(faults=plan), zsim.simulate(scenario))


@EXAMPLES
@given(strategies.scenarios(), st.data())
def test_liveness_a_step_whose_faults_only_delay_ends_and_is_delayed_by_no_more(
    scenario: zsim.Scenario, data: st.DataObject
) -> None:
    kinds = tuple(kind for kind in DELAYING if kind != "slow_link")
    live(scenario.with_(faults=data.draw(strategies.fault_plans(scenario, kinds))))


@EXAMPLES
@given(strategies.scenarios(), st.data())
def test_liveness_what_could_not_end_ends_once_the_fatal_faults_have_stopped(
    scenario: zsim.Scenario, data: st.DataObject
) -> None:
    plan = data.draw(strategies.fault_plans(scenario, fewest=2))
    stopped = [fault for fault in plan if fault["kind"] not in FATAL_KINDS]
    result = simulated(scenario.with_(faults=stopped))
    assert isinstance(result, zsim.Run)
    assert len(result.faults) == len(stopped)


def test_casts_of_a_rank_that_waits_meet_kernels_that_they_meet_in_no_clean_step() -> None:
    scenario = zsim.Scenario(
        model={"family": "llama", "sizes": {
            "num_layers": 1, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "vocabulary": 13,
            "feed_forward": 10, "tied": False, "attention": "explicit"}},
        batch={"micro_batch": 2, "forwards": 2, "sequence_length": 4},
        cluster={"preset": "dgx-a100", "ranks": 2},
        strategy={"name": "zero2", "dp_replicate": 2, "dp_shard": 1, "granularity": "parameter"},
        precision={"parameters": "bf16", "reduce": "fp32"},
        optimizer={"name": "sgd", "momentum": 0.9},
        execution={"interference": False, "issue_kernel": "6 us"},
    )
    late = scenario.with_(faults=[{"kind": "late_start", "rank": 0, "by": "22 us"}])
    clean, faulty = zsim.simulate(scenario), zsim.simulate(late)
    own, waiting = clean.ranks[0].spans, faulty.ranks[1].spans
    longer = sum(
        (there.end_ns - there.start_ns) - (here.end_ns - here.start_ns)
        for here, there in zip(own, waiting, strict=True)
        if here.kind == "copy" and here.stream != "compute"
    )
    assert longer > 0
    assert (faulty.step_time or 0) == (clean.step_time or 0) + 22_000 + longer
    live(late)


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_each_kind_is_drawn_and_shrinks_to_one_fault(kind: str) -> None:
    plan = find(
        strategies.fault_plans(SMALL), lambda plan: any(each["kind"] == kind for each in plan),
        settings=QUIET,
    )
    assert [fault["kind"] for fault in plan] == [kind]
    assert len(SMALL.with_(faults=plan).faults) == 1


def test_plans_are_as_long_as_asked_and_tell_nothing_twice() -> None:
    most = find(strategies.fault_plans(SMALL), lambda plan: len(plan) == MOST_FAULTS,
                settings=QUIET)
    assert len(SMALL.with_(faults=most).faults) == MOST_FAULTS


@settings(EXAMPLES, max_examples=100)
@given(strategies.fault_plans(PAIR, ("failure", "skipped_collective", "reordered_collective")))
def test_plans_have_nothing_that_a_scenario_refuses(plan: list[dict[str, Any]]) -> None:
    assert len(PAIR.with_(faults=plan).faults) == len(plan)
