"""Rings as steps in whole scenarios: faults, meshes, limits, and what a Run says of them."""

from __future__ import annotations

import gc
import re

import pytest

import zsim
from tests.support.folders import SCENARIOS
from zsim.engine.costs.op_costs import Costs
from zsim.engine.events.prepared import Prepared
from zsim.engine.ring_steps import work
from zsim.engine.ring_steps.work import EventsError
from zsim.engine.simulate import simulate_round
from zsim.engine.simulate_step import simulate_step
from zsim.errors import DeadlockError
from zsim.ir.gc_pause import uncollected
from zsim.scenario.plan import plan
from zsim.testing.laws import check_laws

STEPS = {"detail": "steps"}
FSDP2 = zsim.load(SCENARIOS / "parity" / "fsdp2-gpt-4.toml").with_(execution=STEPS, expect=None)


def two_nodes(preset: str = "dgx-a100", **tables: object) -> zsim.Scenario:
    """Two layers on two nodes of eight."""
    made = {
        "model": {"preset": "llama-3.2-1b", "num_layers": 2},
        "batch": {"micro_batch": 1, "sequence_length": 512},
        "cluster": {"preset": preset, "nodes": 2},
        "strategy": {"name": "fsdp2"},
        "precision": {"parameters": "bf16"},
        "execution": STEPS,
    }
    return zsim.Scenario(**{**made, **tables})  # type: ignore[arg-type]


def hybrid(replicate: int, shard: int, **tables: object) -> zsim.Scenario:
    strategy = {"name": "hsdp", "dp_replicate": replicate, "dp_shard": shard}
    return two_nodes(strategy=strategy, **tables)


def test_a_run_says_that_its_rings_are_steps_and_what_goes_round_none():
    run = zsim.simulate(two_nodes("dgx-h100", strategy={"name": "ddp"}))
    assert run.record.provenance["detail"] == "steps"
    assert run.record.provenance["closed_form"] == "all_reduce over dp_replicate (nvls_tree)"
    flows = zsim.simulate(two_nodes("dgx-h100", strategy={"name": "ddp"}, execution=None))
    assert {"detail", "closed_form"} & flows.record.provenance.keys() == set()
    assert run.step_time == flows.step_time


def test_a_run_of_steps_has_every_rank():
    run = zsim.simulate(two_nodes())
    assert [(rank.rank, rank.stands_for) for rank in run.ranks] == [(n, 1) for n in range(16)]
    assert "closed_form" not in run.record.provenance


@pytest.mark.parametrize(
    "scenario",
    [
        two_nodes(),
        hybrid(2, 8),
        hybrid(8, 2),
        hybrid(4, 4),
        hybrid(1, 16),
        hybrid(16, 1),
        hybrid(3, 4, cluster={"preset": "dgx-a100", "nodes": 2, "ranks": 12}),
        two_nodes(cluster={"preset": "p4d", "nodes": 2, "ranks": 11}),
        two_nodes(strategy={"name": "zero_redundancy"}),
        two_nodes(strategy={"name": "zero3"}),
        two_nodes(faults=[{"kind": "late_start", "rank": 3, "by": "2 ms"}]),
        two_nodes(faults=[{"kind": "slow_rank", "rank": 9, "factor": 1.7}]),
        two_nodes(faults=[{"kind": "slow_link", "node": 1, "nic": 4, "bandwidth": "20 Gbit/s"}]),
        two_nodes(faults=[{"kind": "jitter", "mean": "100 us", "each": "op"}]),
        two_nodes(cluster={"preset": "dgx-a100", "nodes": 1, "ranks": 1}),
    ],
    ids=lambda scenario: f"{scenario.strategy}-{scenario.mesh.shape}-{len(scenario.faults)}",
)
def test_runs_of_steps_obey_the_laws_of_runs(scenario):
    """Laws that simulate other scenarios hold Programs and flows, and take their time."""
    assert check_laws(zsim.simulate(scenario), simulating=False) > 5


def test_all_laws_can_be_asked_of_a_run_of_steps():
    """Ranks are never folded there."""
    case = zsim.load(SCENARIOS / "parity" / "hsdp-gpt-2x2.toml").with_(execution=STEPS)
    assert check_laws(zsim.simulate(case)) > 20


FAULTS = [
    {"kind": "skipped_collective", "rank": 2, "at": "all_gather blocks.0"},
    {"kind": "skipped_collective", "rank": 0, "at": "reduce_scatter blocks.1"},
    {"kind": "reordered_collective", "rank": 1, "at": "all_gather root"},
    {"kind": "failure", "rank": 3, "at": "backward blocks.1"},
    {"kind": "failure", "rank": 0, "at": "forward blocks.0"},
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault['kind']}-{fault['rank']}")
def test_faults_that_end_a_step_are_told_as_with_flows(fault):
    told = []
    for detail in ("flows", "steps"):
        with pytest.raises(DeadlockError) as caught:
            zsim.simulate(FSDP2.with_(faults=[fault], execution={"detail": detail}))
        told.append(re.sub(r"rank \d+ issues", "another issues", str(caught.value)))
    assert told[0] == told[1]


def test_a_lost_link_ends_a_step_of_steps_too():
    lost = [{"kind": "lost_link", "node": 1, "nic": 4}]
    with pytest.raises(DeadlockError, match=r"^lost_link: node 1, nic 4 \(of rank 12\): .*"):
        zsim.simulate(two_nodes(faults=lost))


@pytest.mark.parametrize(
    "scenario",
    [
        hybrid(2, 16, cluster={"preset": "dgx-a100", "nodes": 4}),
        two_nodes(strategy={"name": "zero_redundancy"}),
        zsim.load(SCENARIOS / "parity" / "hsdp-gpt-2x2.toml").with_(execution=STEPS),
    ],
    ids=lambda scenario: scenario.strategy,
)
def test_the_events_counted_beforehand_are_those_that_happen(scenario):
    program = plan(scenario, device=scenario.cluster.kind)
    costs = Costs(scenario.cluster, scenario.executed)
    timeline = simulate_step(program, costs=costs, note_hops=True)
    assert len(timeline.hops) == work.num_hops(program, costs)


def test_too_many_events_are_refused_before_any_happens():
    scenario = zsim.load(SCENARIOS / "scale" / "fsdp2-gpt-1024.toml").with_(execution=STEPS)
    with pytest.raises(EventsError) as caught:
        zsim.simulate(scenario)
    assert str(caught.value) == (
        'execution.detail = "steps": expected at most 4,000,000 events, found 19,903,488, the hops '
        'of chunks; take detail = "flows", which needs none of them; small enough are about 20 % '
        "of the layers, or 44 % of the ranks"
    )


def test_what_a_refusal_calls_small_enough_is(monkeypatch):
    """Half as many ranks of a ring have a quarter of the hops."""
    def events(layers, ranks):
        cluster = {"preset": "dgx-a100", "nodes": ranks // 8}
        scenario = two_nodes(
            model={"preset": "llama-3.2-1b", "num_layers": layers}, cluster=cluster
        )
        return work.num_hops(plan(scenario, device="cuda"), Costs(scenario.cluster))

    most = events(4, 32)
    monkeypatch.setattr(work, "MOST_EVENTS", most)
    with pytest.raises(EventsError, match=r"about 24 % of the layers, or 49 % of the ranks"):
        work.require_few(4 * most + 1)
    assert events(8, 32) > most >= events(16, 16) > 0.8 * most


@pytest.mark.parametrize(("events", "told"), [(7 * 10**6, "57 % "), (10**9, "0.4 % ")])
def test_a_refusal_tells_two_digits(events, told):
    with pytest.raises(EventsError, match=f"about {told}of the layers"):
        work.require_few(events)


def test_ways_over_shared_links_count_and_so_do_seeds(monkeypatch):
    scenario = hybrid(2, 16, cluster={"preset": "dgx-a100", "nodes": 4})
    program = plan(scenario, device="cuda")
    costs = Costs(scenario.cluster, scenario.executed)
    monkeypatch.setattr(work, "MOST_EVENTS", work.num_hops(program, costs))
    with pytest.raises(EventsError, match=f"{work.SHARED}; take"):
        simulate_step(program, costs=costs)
    jittery = two_nodes(faults=[{"kind": "jitter", "mean": "1 ms"}])
    with pytest.raises(EventsError, match="ways over shared links"):
        zsim.jitter(jittery, seeds=50)


def test_jitter_is_simulated_in_the_detail_that_is_asked_for():
    jittery = two_nodes(faults=[{"kind": "jitter", "mean": "1 ms"}])
    steps = zsim.jitter(jittery, seeds=3)
    flows = zsim.jitter(jittery.with_(execution=None), seeds=3)
    assert steps.clean_ns == flows.clean_ns
    assert steps.mean_ns != flows.mean_ns


def test_a_simulation_leaves_no_reference_cycles_but_simpy_s():
    """The garbage collector is off in simulations, of which there are thousands under jitter."""
    scenario = hybrid(2, 8)
    program, costs = plan(scenario, device="cuda"), Costs(scenario.cluster, scenario.executed)
    with uncollected():
        left = []
        for stepwise in (None, costs):
            prepared = Prepared(program, costs=costs, stepwise=stepwise)
            gc.collect()
            simulate_round(prepared)
            left.append(gc.collect())
    assert left[0] == left[1] < 20
