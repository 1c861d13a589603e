"""Steps of distinct ranks by columns: the times of events, or not taken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

import zsim
from tests.support.cases.distinct_cases import outcome, with_distinct_ranks
from tests.support.programs.hand_made import Plain, compute, gather, program
from zsim.engine.columns.rounds import Rows, in_columns
from zsim.engine.costs.op_costs import Costs
from zsim.engine.faults.draws import draw_ns
from zsim.engine.faults.fault import Fault, Jitter, LateStart, SlowRank
from zsim.engine.faults.faulty_program import faulty_program
from zsim.engine.faulty_step import simulate_faulty_step
from zsim.engine.simulate_step import prepared_step, timeline_of, timeline_of_many
from zsim.engine.timeline import Timeline
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Op, Stream
from zsim.scenario.plan import planned

SIXTEEN = Mesh(dp_shard=16)
SHARING_LINKS = {"name": "hsdp", "dp_replicate": 2, "dp_shard": 8}
OF_OPS = {"kind": "jitter", "mean": "20 us", "each": "op", "seed": 3}


def llama(**more: Any) -> zsim.Scenario:
    return zsim.Scenario(**{
        "model": {"preset": "llama-3-8b", "num_layers": 4},
        "batch": {"micro_batch": 1, "sequence_length": 2048, "accumulation": 2},
        "cluster": {"preset": "dgx-a100", "nodes": 2}, "strategy": {"name": "fsdp2"},
        "precision": {"parameters": "bf16"}, "faults": [OF_OPS], **more,
    })


def both(*ops: Op, faults: tuple[Fault, ...], share: float = 0.25) -> tuple[Timeline, Timeline]:
    """The times of these ops on 16 ranks by columns and by events; `share` is lost to overlap."""
    costs = Plain(share=share, collective_interference=0.1)
    prepared = prepared_step(faulty_program(program(*ops, mesh=SIXTEEN), faults), costs=costs)
    return (
        timeline_of_many(prepared, faults, costs=costs),
        timeline_of(prepared, costs=costs, faults=faults),
    )


@settings(max_examples=25, deadline=None)
@given(with_distinct_ranks())
def test_columns_have_the_times_of_events(scenario: zsim.Scenario) -> None:
    """tests/measured/distinct_ranks.json counts those of 1,010."""
    assert outcome(scenario) in ("equal", "events")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("each", ["step", "op"])
def test_sixteen_jittery_ranks_are_simulated_by_columns(strategy: str, each: str) -> None:
    assert outcome(llama(strategy={"name": strategy}, faults=[{**OF_OPS, "each": each}])) == "equal"


def test_ranks_with_shards_of_other_sizes_are_simulated_by_columns() -> None:
    """The last of 16 ranks have fewer of 36 rows, or none, so their kernels are others."""
    sizes = {"dims": [36, 36, 36], "hidden": 36, "num_classes": 9}
    odd = zsim.Scenario(
        model={"family": "mlp", "sizes": sizes}, batch={"micro_batch": 8},
        cluster={"preset": "dgx-a100", "nodes": 2}, strategy={"name": "fsdp2"}, faults=[OF_OPS],
    )
    assert len(planned(odd).program.steps) > 1
    assert outcome(odd) == "equal"


@pytest.mark.parametrize("more", [
    {"strategy": SHARING_LINKS},
    {"strategy": {"name": "zero2"}, "offload": {"optimizer": "cpu"}},
    {"faults": [OF_OPS, {"kind": "lost_link", "node": 0, "nic": 0}]},
    {"faults": [OF_OPS, {"kind": "skipped_collective", "rank": 1, "at": "all_gather blocks.1"}]},
    {"execution": {"detail": "steps"}, "model": {"preset": "llama-3-8b", "num_layers": 1}},
])
def test_ranks_that_meet_otherwise_need_events(more: dict[str, Any]) -> None:
    scenario = llama(**more)
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    faulty = faulty_program(planned(scenario).program, scenario.faults)
    assert not in_columns(prepared_step(faulty, costs=costs))


def copy(index: int, stream: Stream, ns: int) -> Op:
    kernels = (Kernel("copy", ns, 0, "float32"),)
    return Op(index=index, kind="copy", unit="b", stream=stream, kernels=kernels)


def test_three_kernels_at_once_lose_what_they_do_by_events() -> None:
    """Copies of two streams begin beside a kernel on some ranks, and behind it on others."""
    faults = (Jitter(mean_ns=50, each="op", seed=1),)
    ops = (
        compute(0, "a", 100), gather(1, "b", 75), copy(2, "reduce_scatter", 130),
        copy(3, "all_gather", 51), compute(4, "a", 60), gather(5, "b", 30, 3, 4),
    )
    columns, events = both(*ops, faults=faults)
    assert columns == events
    lost = {times.ends[2] - times.starts[2] - 130 for times in events.ranks.values()}
    assert len(lost) > 8


def test_a_kernel_beside_a_costly_collective_loses_no_more_than_by_events() -> None:
    """The kernel would lose all of its time and more; it loses nine tenths."""
    faults = (Jitter(mean_ns=50, each="op", seed=1),)
    ops = (
        compute(0, "a", 100), gather(1, "b", 5000, 0), compute(2, "c", 300),
        compute(3, "d", 10, 1),
    )
    columns, events = both(*ops, faults=faults, share=3.0)
    assert columns == events
    for rank, times in events.ranks.items():
        alone = 300 + draw_ns(faults[0], rank=rank, op=2)
        assert 9 * alone < times.ends[2] - times.starts[2] <= 10 * alone


def test_pauses_of_the_trainer_are_no_overlap_with_what_runs_beside_them() -> None:
    paused = {"step_overhead": "1 ms", "micro_batch_overhead": "200 us"}
    assert outcome(llama(execution=paused)) == "equal"


def test_each_stretch_between_collectives_is_as_long_as_on_its_slowest_rank() -> None:
    """Sixteen ranks with jitter, one slow, one late: the sum of the largest draws, by hand."""
    jitter = Jitter(mean_ns=1000, each="op", seed=5)
    faults = jitter, SlowRank(rank=3, factor=3.0), LateStart(rank=7, by_ns=4000)
    step = program(
        compute(0, "a", 100), gather(1, "b", 40, 0), compute(2, "a", 200, 1),
        gather(3, "b", 30, 2), mesh=SIXTEEN,
    )
    _, timeline = simulate_faulty_step(step, faults, costs=Plain())
    assert isinstance(timeline.ranks, Rows)

    def slowest(op: int, ns: int, late: int) -> int:
        return max(
            draw_ns(jitter, rank=rank, op=op) + ns * (3 if rank == 3 else 1)
            + (late if rank == 7 else 0)
            for rank in range(16)
        )

    assert timeline.step_time_ns == slowest(0, 100, 4000) + 40 + slowest(2, 200, 0) + 30
    assert [times.ends[3] for times in timeline.ranks.values()] == [timeline.step_time_ns] * 16
    assert len({times.arrived[3] for times in timeline.ranks.values()}) == 16


def test_more_ranks_are_allowed_where_columns_take_them_and_few_are_kept(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, sharing = llama(), llama(strategy=SHARING_LINKS)
    whole = zsim.simulate(scenario)
    monkeypatch.setattr("zsim.scenario.checks.work_limits.MAX_WORK", 100)
    run = zsim.simulate(scenario, ranks=[0, 3])
    with pytest.raises(zsim.ZsimError, match="a few ranks, which suffice where all meet"):
        zsim.simulate(scenario, ranks=range(16))
    assert run.step_time == whole.step_time
    assert [rank.spans for rank in run.ranks] == [whole.ranks[number].spans for number in (0, 3)]
    with pytest.raises(zsim.ZsimError, match="or ask for the times of a few ranks, which suffice"):
        zsim.simulate(scenario)
    with pytest.raises(zsim.ZsimError, match="found 16 × .*; also for a few ranks, which"):
        zsim.simulate(sharing, ranks=[0])


def test_a_study_of_jitter_may_be_longer_where_columns_take_its_ranks(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zsim.analysis.jitter.MOST_WORK", 100)
    assert len(zsim.jitter(llama(), seeds=2).times_ns) == 2
    with pytest.raises(zsim.ZsimError, match="seeds of at most 100, found "):
        zsim.jitter(llama(strategy=SHARING_LINKS), seeds=2)
