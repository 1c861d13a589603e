"""Figures of many micro-batches from five of them: equal to those of all, or not taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

import zsim
from tests.support.cases.micro_batch_cases import outcome, with_micro_batches
from zsim.analysis.assessed import drafted_of_few, figures, of_planned
from zsim.engine.costs.op_costs import Costs
from zsim.engine.equal_micro_batches import FEWEST, fourth_micro_batch, repeated
from zsim.ir.ops import Kernel
from zsim.ir.program import RankProgram
from zsim.scenario.plan import Planned, planned


def llama(strategy: str, accumulation: int) -> zsim.Scenario:
    return zsim.Scenario(
        model={"preset": "llama-3-8b", "num_layers": 3},
        batch={"micro_batch": 1, "sequence_length": 2048, "accumulation": accumulation},
        cluster={"preset": "dgx-a100", "nodes": 2}, strategy={"name": strategy},
        precision={"parameters": "bf16"},
    )


@settings(max_examples=20, deadline=None)
@given(with_micro_batches())
def test_five_micro_batches_tell_of_all(scenario: zsim.Scenario) -> None:
    """zsim/engine/README.md says how many of 1,400 were equal: all that were taken."""
    assert outcome(scenario) in ("equal", "all")


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "ddp", "zero2", "zero3", "deepspeed3"])
def test_thirty_micro_batches_are_told_from_five(strategy: str) -> None:
    scenario = llama(strategy, 30)
    assert figures(scenario) == of_planned(planned(scenario))
    few = drafted_of_few(scenario)
    assert few is not None
    assert few.figures() is not None


@pytest.mark.parametrize(("width", "full"), [(3104, "steady"), (3136, "first")])
def test_a_device_that_is_too_full_for_five_is_as_full_for_twelve(width: int, full: str) -> None:
    sizes = {
        "num_layers": 12, "hidden_size": width, "num_heads": 32, "vocabulary": 50257,
        "max_positions": 1024,
    }
    scenario = zsim.Scenario(
        model={"family": "gpt", "sizes": sizes}, cluster={"preset": "dgx-a100-40"},
        batch={"micro_batch": 1, "sequence_length": 1024, "accumulation": 12},
        strategy={"name": "ddp"}, precision={"parameters": "bf16", "reduce": "fp32"},
    )
    few = drafted_of_few(scenario)
    assert few is not None
    assert few.figures() == of_planned(planned(scenario))
    memory, _ = figures(scenario)
    assert memory.pressure is not None
    assert memory.pressure.full_at == f"optimizer root of the {full} step"


def test_few_micro_batches_are_all_simulated() -> None:
    assert drafted_of_few(llama("fsdp2", FEWEST + 1)) is None


def test_rings_as_steps_are_all_simulated() -> None:
    assert drafted_of_few(llama("fsdp2", 30).with_(execution={"detail": "steps"})) is None


def changed(rank: RankProgram, index: int) -> RankProgram:
    """`rank` with one kernel more in a steady op."""
    op = rank.steady[index]
    more = replace(op, kernels=(*op.kernels, Kernel("gelu", 0, 10**9, "bfloat16")))
    return replace(rank, steady=(*rank.steady[:index], more, *rank.steady[index + 1 :]))


def case_of_five() -> tuple[Planned, range]:
    case = planned(llama("fsdp2", FEWEST))
    (rank,) = case.program.ranks
    fourth = fourth_micro_batch(rank, "steady")
    assert fourth is not None
    return case, fourth


def test_a_fourth_micro_batch_with_another_kernel_is_not_repeated() -> None:
    case, fourth = case_of_five()
    assert fourth_micro_batch(changed(case.program.ranks[0], fourth.start + 5), "steady") is None


def test_a_second_micro_batch_that_is_longer_still_lets_the_later_ones_repeat() -> None:
    """Only the third and the fourth are compared: what is before them is in the five."""
    case, fourth = case_of_five()
    second = next(
        op.index - 2 * len(fourth) for op in case.program.ranks[0].steady[fourth.start :]
        if op.kind == "forward"
    )
    costs = Costs(cluster=case.scenario.cluster, execution=case.scenario.executed)
    as_it_is = repeated(case.program, costs=costs, times=10)
    longer = replace(case.program, ranks=(changed(case.program.ranks[0], second),))
    later = repeated(longer, costs=costs, times=10)
    assert as_it_is is not None
    assert later is not None
    assert later.period_ns == as_it_is.period_ns
    assert later.step_time_ns > as_it_is.step_time_ns
