"""Adding a gradient to that of earlier micro-batches costs a kernel for each parameter where
autograd finds a gradient to add to."""

from __future__ import annotations

from collections import Counter

import pytest

from zsim.engine.costs.op_costs import Costs
from zsim.ir.ops import ACCUMULATE, Kernel
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse


def scenario(
    strategy: str, *, sync: str, precision: str = 'parameters = "fp32"', execution: str = ""
) -> Scenario:
    text = f"""
model = {{ family = "gpt", sizes = {{ num_layers = 2, hidden_size = 8, num_heads = 2, vocabulary = 13, tied = true }} }}
batch = {{ micro_batch = 2, sequence_length = 4, accumulation = 3 }}
cluster = {{ preset = "dgx-h100", ranks = 2 }}
strategy = {{ {strategy}, sync = "{sync}" }}
precision = {{ {precision} }}
{execution}
"""  # noqa: E501
    return parse(text.encode(), where="accumulation.toml")


def accumulated(case: Scenario) -> list[Counter[int]]:
    """Elements of each accumulation and their counts, by micro-batch."""
    counts = [Counter[int]() for _ in range(case.batch.accumulation)]
    for op in plan(case, device="cuda").ranks[0].steady:
        for kernel in op.kernels:
            if kernel.operator == ACCUMULATE:
                assert op.kind == "backward"
                counts[op.micro_batch][kernel.flops] += 1
    return counts


def all_parameters(case: Scenario) -> Counter[int]:
    return Counter(parameter.numel for parameter in case.model.parameters)


@pytest.mark.parametrize("sync", ["every", "last"])
def test_ddp_adds_to_the_gradients_that_the_first_micro_batch_has_made(sync: str) -> None:
    case = scenario('name = "ddp"', sync=sync)
    assert accumulated(case) == [Counter(), all_parameters(case), all_parameters(case)]


@pytest.mark.parametrize("name", ['name = "fsdp2"', 'name = "hsdp", dp_replicate = 2, dp_shard = '
                                                    '1'])
def test_fully_shard_adds_where_gradients_wait_unsharded_and_nowhere_else(name: str) -> None:
    case = scenario(name, sync="last")
    assert accumulated(case) == [Counter(), all_parameters(case), all_parameters(case)]
    assert accumulated(scenario(name, sync="every")) == [Counter()] * 3


def test_gradients_that_wait_in_another_dtype_are_cast_first_and_added_to_later() -> None:
    case = scenario('name = "fsdp2"', sync="last", precision='parameters = "bf16", reduce = "fp32"')
    assert accumulated(case) == [Counter()] * 3
    ops = [
        op for op in plan(case, device="cuda").ranks[0].steady
        if op.kind == "copy" and op.unit == "blocks.0"
    ]
    numels = [
        p.numel for unit in case.model.units if unit.fqn == "blocks.0" for p in unit.parameters
    ]
    added = [
        [
            k.nbytes for op in ops if op.micro_batch == number for k in op.kernels
            if k.operator == "add"
        ]
        for number in range(3)
    ]
    assert added == [[], [numel * 10 for numel in numels], [numel * 10 for numel in numels]]
    cast = [
        k.nbytes for op in ops if op.micro_batch == 0 and op.stream == "compute" for k in op.kernels
    ][-len(numels) :]
    assert cast == [numel * 6 for numel in numels]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_adds_each_gradient_into_its_flat_buffer(name: str) -> None:
    case = scenario(f'name = "{name}"', sync="every")
    assert accumulated(case) == [all_parameters(case)] * 3


def test_products_that_accumulate_leave_nothing_to_issue_or_to_run() -> None:
    kernel = Kernel(ACCUMULATE, 100, 1200, "float32")
    plain, fused = (
        scenario('name = "ddp"', sync="last", execution=how)
        for how in ("", 'execution.accumulation = "fused"')
    )
    assert Costs(plain.cluster, plain.executed).compute_ns((kernel,)) > 0
    costs = Costs(fused.cluster, fused.executed)
    assert costs.compute_ns((kernel,)) == 0
    op = next(
        op for op in plan(fused, device="cuda").ranks[0].steady
        if any(k.operator == ACCUMULATE for k in op.kernels)
    )
    others = sum(k.operator != ACCUMULATE for k in op.kernels)
    assert costs.issue_ns(op) == others * fused.cluster.overheads.issue_operator
