"""A step without most of its equal layers: the times of the whole one, or not taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

import zsim
from tests.support.cases.layer_cases import outcome, with_layers
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import (
    is_settled,
    prepared_step,
    timeline_of,
    timeline_of_few,
)
from zsim.engine.timeline import Timeline
from zsim.ir.ops import Kernel
from zsim.ir.program import Program
from zsim.scenario.plan import planned


def llama(strategy: str, layers: int) -> zsim.Scenario:
    return zsim.Scenario(
        model={"preset": "llama-3-8b", "num_layers": layers},
        batch={"micro_batch": 1, "sequence_length": 2048, "accumulation": 1},
        cluster={"preset": "dgx-a100", "nodes": 2}, strategy={"name": strategy},
        precision={"parameters": "bf16"},
    )


def of_few(scenario: zsim.Scenario, program: Program) -> Timeline | None:
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    return timeline_of_few(program, costs=costs, contention=True, settled=is_settled)


@settings(max_examples=12, deadline=None)
@given(with_layers())
def test_few_layers_tell_of_all(scenario: zsim.Scenario) -> None:
    """tests/measured/equal_layers.json counts those of 1,001."""
    assert outcome(scenario) in ("equal", "all")


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "zero1", "zero2", "zero3"])
def test_thirty_two_layers_are_told_from_few(strategy: str) -> None:
    assert outcome(llama(strategy, 32)) == "equal"


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_reductions_of_a_backward_slow_down_the_layers_alone_that_they_run_beside(
    accumulation: int,
) -> None:
    """Reductions that wait in their stream end amid the layers of the next forward: those that are
    kept tell nothing of the others."""
    scenario = zsim.Scenario(
        model={"preset": "llama-3-8b"}, strategy={"name": "zero2"},
        batch={"micro_batch": 1, "sequence_length": 1024, "accumulation": accumulation},
        cluster={"preset": "dgx-h100"}, precision={"parameters": "bf16", "reduce": "fp32"},
    )
    assert outcome(scenario) == ("equal" if accumulation == 1 else "all")


def test_gathers_that_gain_on_compute_do_so_in_layers_that_are_kept() -> None:
    """Gathers of Llama 3 405B gain 2.7 of 123 ms per layer, until they wait for compute."""
    scenario = zsim.Scenario(
        model={"preset": "llama-3-405b"}, batch={"micro_batch": 1, "sequence_length": 8192},
        cluster={"preset": "dgx-h100", "nodes": 2048}, strategy={"name": "fsdp2"},
        precision={"parameters": "bf16"},
    )
    assert outcome(scenario) == "equal"


def test_ranks_that_differ_in_their_shards_alone_have_the_times_of_a_whole_step() -> None:
    scenario = llama("fsdp2", 32).with_(cluster={"nodes": 20})
    assert len(planned(scenario).program.ranks) == 6
    assert outcome(scenario) == "equal"


def test_an_optimizer_that_its_stream_alone_holds_up_is_so_in_all_ranks() -> None:
    scenario = llama("fsdp2", 32).with_(cluster={"nodes": 20})
    program = planned(scenario).program
    ranks = tuple(
        replace(rank, steady=tuple(
            replace(op, waits=()) if op.kind == "optimizer" else op for op in rank.steady
        ))
        for rank in program.ranks
    )
    without_waits = replace(program, ranks=ranks)
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    whole = timeline_of(prepared_step(without_waits, costs=costs), costs=costs)
    assert of_few(scenario, without_waits) == whole


def test_a_model_of_ten_layers_is_simulated_whole() -> None:
    assert outcome(llama("fsdp2", 10)) == "all"


def test_a_layer_with_one_kernel_more_is_simulated_itself() -> None:
    scenario = llama("fsdp2", 32)
    program = planned(scenario).program
    (rank,) = program.ranks
    op = next(op for op in rank.steady if op.kind == "forward" and op.unit == "blocks.0")
    more = replace(op, kernels=(*op.kernels, Kernel("gelu", 0, 10**9, "bfloat16")))
    ops = (*rank.steady[: op.index], more, *rank.steady[op.index + 1 :])
    longer = replace(program, ranks=(replace(rank, steady=ops),))
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    whole = timeline_of(prepared_step(longer, costs=costs), costs=costs)
    assert of_few(scenario, longer) == whole != of_few(scenario, program)
