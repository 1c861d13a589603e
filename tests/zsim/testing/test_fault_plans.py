"""Random fault plans, in two modes.

Safety: with faults at any time nothing wrong is said. Liveness: where faults only delay, or stop,
the step makes progress.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import zsim
from zsim.engine.costs import Costs
from zsim.engine.faults.fault import FAULT_KINDS
from zsim.engine.faults.fault_delays import fault_delays
from zsim.engine.faults.faulty_program import faulty_program
from zsim.errors import DeadlockError
from zsim.scenario.plan import planned
from zsim.testing import check_laws, strategies
from zsim.testing.strategies.faults import DELAYING, MOST_FAULTS

QUIET = settings(max_examples=2000, phases=[Phase.generate, Phase.shrink], database=None)
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FATAL = ("failure", "lost_link", "skipped_collective", "reordered_collective")
SMALL = zsim.Scenario(
    model={"preset": "mlp-tiny"}, batch={"micro_batch": 2},
    cluster={"preset": "pcie-box", "nodes": 2}, strategy={"name": "fsdp2"},
)


def simulated(scenario: zsim.Scenario) -> zsim.Run | DeadlockError:
    try:
        return zsim.simulate(scenario)
    except DeadlockError as error:
        return error


@EXAMPLES
@given(strategies.scenarios(), st.data())
def test_safety_nothing_wrong_is_said_with_faults_at_any_time(
    scenario: zsim.Scenario, data: st.DataObject
) -> None:
    plan = data.draw(strategies.fault_plans(scenario))
    faulty, clean = scenario.with_(faults=plan), zsim.simulate(scenario)
    result = simulated(faulty)
    if isinstance(result, DeadlockError):
        assert any(fault["kind"] in FATAL for fault in plan)
        assert all(str(fault) in result.remedy for fault in faulty.faults)
        return
    assert not any(fault["kind"] == "failure" for fault in plan)
    assert [told.partition(":")[0] for told in result.faults] == [each["kind"] for each in plan]
    assert "WITH FAULTS" in repr(result)
    for other in (clean, result):
        comparison = zsim.compare(result, other)
        assert not comparison.agrees
        assert "agrees" not in str(comparison.agreement)
    assert not zsim.compare(clean, result).ok
    assert all(late.held_up_ns <= (result.step_time or 0) * late.last_at for late in result.late)
    check_laws(result, simulating=False, without=("members issue alike",))


@EXAMPLES
@given(strategies.scenarios(), st.data())
def test_liveness_a_step_whose_faults_only_delay_ends_and_is_delayed_by_no_more(
    scenario: zsim.Scenario, data: st.DataObject
) -> None:
    kinds = tuple(kind for kind in DELAYING if kind != "slow_link")
    faulty = scenario.with_(faults=data.draw(strategies.fault_plans(scenario, kinds)))
    run, clean = zsim.simulate(faulty), zsim.simulate(scenario)
    assert run.step_time is not None
    assert clean.step_time is not None
    program = faulty_program(planned(scenario).program, faulty.faults)
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    delays = fault_delays(program, faulty.faults, costs=costs)
    of_all = sum(
        delays[kind].start + sum(delays[kind].longer.values()) for kind in program.assignment
    )
    assert clean.step_time <= run.step_time <= clean.step_time + of_all
    assert zsim.simulate(faulty.with_(faults=None)).record == clean.record


@EXAMPLES
@given(strategies.scenarios(), st.data())
def test_liveness_what_could_not_end_ends_once_the_fatal_faults_have_stopped(
    scenario: zsim.Scenario, data: st.DataObject
) -> None:
    plan = data.draw(strategies.fault_plans(scenario, fewest=2))
    stopped = [fault for fault in plan if fault["kind"] not in FATAL]
    result = simulated(scenario.with_(faults=stopped))
    assert isinstance(result, zsim.Run)
    assert len(result.faults) == len(stopped)


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
