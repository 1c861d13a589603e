"""FSDP and the executor on a CPU, which do one thing after another. gloo's collectives block the
thread that calls them, on which kernels run as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zsim.analysis.simulated_step import explain_step
from zsim.cli.reports import time_report
from zsim.engine.costs.issue_times import SOON_NS, TICK_NS
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.ir.ops import COLLECTIVES
from zsim.runs.backend import RunOptions
from zsim.runs.figures import metrics
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario
from zsim.scenario.plan import Planned, plan
from zsim.scenario.scenario import Scenario


def parsed(strategy: str, cluster: str = 'preset = "cpu-gloo", ranks = 4') -> Scenario:
    text = (
        'model = { preset = "gpt-tiny" }\nbatch = { micro_batch = 2, sequence_length = 64 }\n'
        f"cluster = {{ {cluster} }}\nstrategy = {{ {strategy} }}\n"
    )
    return scenario.parse(text.encode(), where="cpu.toml", folder=Path())


@pytest.mark.parametrize(("strategy", "hides"), [
    ('name = "fsdp2"', False),
    ('name = "fsdp2", forward_prefetch = 2, backward_prefetch = 2', False),
    ('name = "hsdp", dp_replicate = 2, dp_shard = 2', False),
    ('name = "fsdp1", dp_replicate = 2, dp_shard = 2', False),
    ('name = "ddp", bucket_cap_mb = 0.1', True), ('name = "zero1"', False),
    ('name = "zero2"', False), ('name = "zero3", lookahead = 1', False),
])
def test_on_a_cpu_ddp_alone_hides_communication(strategy: str, hides: bool) -> None:
    run = SimBackend().run(parsed(strategy), options=RunOptions())
    figures = metrics.figures(run, parsed(strategy))
    assert figures.communication_ns
    assert figures.exposed_communication_ns
    assert (figures.exposed_communication_ns < figures.communication_ns) is hides


def test_beside_emulated_compute_the_executor_has_a_queue_and_fsdp_has_none() -> None:
    """zreal.executor.communication_stream.CollectiveQueue, beside timers."""
    zero3, fsdp2 = parsed('name = "zero3", lookahead = 1'), parsed('name = "fsdp2"')
    assert zero3.executed.synchronous
    assert not zero3.executed_on(zero3.cluster.with_idle_cores).synchronous
    assert fsdp2.executed_on(fsdp2.cluster.with_idle_cores).synchronous
    run = SimBackend(cluster=zero3.cluster.with_idle_cores).run(zero3, options=RunOptions())
    figures = metrics.figures(run, zero3)
    assert figures.communication_ns
    assert figures.exposed_communication_ns
    assert figures.exposed_communication_ns < figures.communication_ns


def test_a_step_on_a_cpu_takes_all_its_ops_and_calls_together() -> None:
    case = parsed('name = "fsdp2"')
    run = SimBackend().run(case, options=RunOptions())
    figures = metrics.figures(run, case)
    assert figures.communication_ns
    ops = plan(case, device="cpu").ranks[0].steady
    host, overheads = 0, case.cluster.overheads
    for op in ops:
        collective = overheads.issue_collective + overheads.issue_hook  # fsdp2 has no others
        kernel = overheads.issue_kernel + (op.kind == "optimizer") * overheads.step_dtensor
        host += collective if op.kind in COLLECTIVES else kernel * len(op.kernels)
    others = sum(
        span.end_ns - span.start_ns for span in run.ranks[0].spans if span.kind not in COLLECTIVES
    )
    assert figures.step_time_ns == figures.communication_ns + others + host


def test_a_gpu_is_never_synchronous_and_the_report_says_why_a_cpu_is() -> None:
    assert not parsed('name = "fsdp2"', 'preset = "dgx-h100"').executed.synchronous
    case = parsed('name = "fsdp2"')
    program = plan(case, device="cpu")
    step = time_report.timed(Planned(case, program))
    reasons = explain_step(case, program, step.timeline)
    assert not reasons.host_bound
    assert sum(wait.exposed_ns for wait in reasons.exposed) == sum(
        wait.duration_ns for wait in reasons.exposed
    )


HYBRID = ", dp_replicate = 2, dp_shard = 2"


@pytest.mark.parametrize(
    "strategy", ['name = "fsdp2"', f'name = "hsdp"{HYBRID}', f'name = "fsdp1"{HYBRID}']
)
def test_where_one_thing_comes_after_another_all_of_them_are_the_critical_path(
    strategy: str
) -> None:
    case = parsed(strategy)
    program = plan(case, device="cpu")
    step = time_report.timed(Planned(case, program))
    reasons = explain_step(case, program, step.timeline)
    run = SimBackend().run(case, options=RunOptions())
    took = {index for index, span in enumerate(run.ranks[0].spans) if span.end_ns > span.start_ns}
    assert took <= {link.op.index for link in reasons.critical_path}
    assert any(
        link.then.endswith("waits for the host, which awaited it") for link in reasons.critical_path
    )


def test_collectives_wait_for_a_core_in_proportion_to_the_compute_before() -> None:
    case = parsed('name = "fsdp2"').with_(batch={"micro_batch": 32, "sequence_length": 128})
    overheads = replace(case.cluster.overheads, wake=1_000_000)
    cluster = replace(case.cluster, overheads=overheads)
    program, execution = plan(case, device="cpu"), case.executed
    plain = Costs(cluster=case.cluster, execution=execution)
    costs = Costs(cluster=cluster, execution=execution)
    ops = program.ranks[0].steady
    waits = costs.wake_ns(ops)
    assert plain.wake_ns(ops) == {}
    assert set(waits) == {op.index for op in ops if op.kind in COLLECTIVES}
    first, second = [op.index for op in ops if op.kind in COLLECTIVES][:2]
    between = ops[first + 1 : second]
    computed = sum(costs.compute_ns(op.kernels) + costs.issue_ns(op) for op in between)
    beyond = max(0, computed - SOON_NS)
    assert waits[second] == 1_000_000 * beyond // (TICK_NS - SOON_NS)
    assert 0 < sum(waits.values()) < 1_000_000 * len(waits)
    longer = simulate_step(program, costs=costs).step_time_ns
    assert longer - simulate_step(program, costs=plain).step_time_ns == sum(waits.values())
    idle = Costs(cluster=cluster.with_idle_cores, execution=execution)
    assert idle.wake_ns(ops) == {}
    assert idle.cluster.device.interference == 0
