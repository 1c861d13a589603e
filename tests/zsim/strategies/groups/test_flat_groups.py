"""Flat buffers of ZeRO, counted by hand: units, parameters, buckets of bytes; frozen ones apart."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.ir.ops import Alloc
from zsim.strategies.flat_buffer.groups import Granularity, Grouping, flat_groups
from zsim.testing.laws import LAWS, check_laws
from zsim.testing.laws.variants import program_of

MODEL = zsim.Scenario(
    model={"family": "mlp", "sizes": {"dims": [3, 5, 4], "hidden": 2, "num_classes": 3}},
    batch={"micro_batch": 2}, cluster={"preset": "cpu-gloo", "ranks": 4},
    strategy={"name": "zero2"}, frozen=["blocks.0.fc1.*"],
).model
"""A head of 12 and 3 elements; a block of 10 and 5 trained ones, and 6 and 2 frozen. Another has
10, 2, 8 and 4."""


@pytest.mark.parametrize(("granularity", "dtype", "trained", "frozen"), [
    ("unit", "float32", [[12, 3], [10, 5], [10, 2, 8, 4]], [[6, 2]]),
    ("parameter", "float32", [[n] for n in (12, 3, 10, 5, 10, 2, 8, 4)], [[6], [2]]),
    # 12 and 3 elements are the 60 B at which a bucket closes, as are 10 and 5
    (60, "float32", [[12, 3], [10, 5], [10, 2, 8], [4]], [[6, 2]]),
    (60, "bfloat16", [[12, 3, 10, 5], [10, 2, 8, 4]], [[6, 2]]),
    (1000, "float32", [[12, 3, 10, 5, 10, 2, 8, 4]], [[6, 2]]),
])
def test_groups_are_cut_where_counting_says(
    granularity: Granularity, dtype: str, trained: list[list[int]], frozen: list[list[int]]
) -> None:
    groups = flat_groups(
        MODEL, grouping=Grouping(granularity=granularity), num_shards=4, dtype=dtype
    )
    cut: dict[bool, list[list[int]]] = {True: [], False: []}
    for each in groups:
        cut[each.trained].append([parameter.numel for parameter in each.group.parameters])
    assert cut == {True: trained, False: frozen}
    assert [each.layout.shard_numel for each in groups] == [
        -(-sum(numels) // 4) for numels in (*trained, *frozen)
    ]


def scenario(strategy: dict[str, Any], *, master: bool = True, **tables: Any) -> zsim.Scenario:
    """Two blocks, part of the first frozen, over four ranks; gradients are reduced in float32."""
    return zsim.Scenario(**{
        "model": {"family": "mlp", "sizes": {"dims": [3, 5, 4], "hidden": 2, "num_classes": 3}},
        "batch": {"micro_batch": 2, "accumulation": 2}, "frozen": ["blocks.0.fc1.*"],
        "cluster": {"preset": "cpu-gloo", "ranks": 4}, "strategy": strategy,
        "precision": {"parameters": "bf16", "reduce": "fp32", "master": master},
        "optimizer": {"name": "adamw", "clip_norm": 1.0}, **tables,
    })


@pytest.mark.parametrize("master", [True, False])
@pytest.mark.parametrize("strategy", [
    {"name": "zero1", "form": "all_reduce"}, {"name": "zero1", "form": "reduce_scatter"},
    {"name": "zero2", "granularity": "60 B"}, {"name": "zero3", "lookahead": 0},
    {"name": "zero3", "lookahead": 2, "granularity": "parameter", "sync": "last"},
    {"name": "zero1", "form": "all_reduce", "dp_shard": 2}, {"name": "zero2", "dp_shard": 2},
    {"name": "zero3", "granularity": "parameter", "dp_shard": 2}, {"name": "zero2", "dp_shard": 1},
], ids=str)
def test_every_stage_obeys_all_laws_with_two_dtypes_and_a_frozen_part(
    strategy: dict[str, Any], master: bool
) -> None:
    assert check_laws(zsim.simulate(scenario(strategy, master=master))) == len(LAWS)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_gradients_are_reduced_last_unit_first_in_their_dtype_with_padding(name: str) -> None:
    case = scenario({"name": name}, optimizer={"name": "adamw"}, batch={"micro_batch": 2})
    run = zsim.simulate(case, all_ranks=True)
    reduced = [
        each.nbytes for each in run.ranks[0].phases["steady"].collectives
        if each.op == "reduce_scatter"
    ]
    assert reduced == [4 * 16, 4 * 24, 4 * 16]  # the head of 15 elements, blocks of 24 and of 15


def test_units_that_end_with_one_module_are_resharded_last_first() -> None:
    gathered = scenario({"name": "zero3", "lookahead": 2, "granularity": "parameter"})
    rank = program_of(gathered).of_rank(0)
    freed = [op.unit for op in rank.steady if op.kind == "free" and op.unit.startswith("blocks.1")]
    order = ["fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"]
    assert freed[:4] == [f"blocks.1.{name}" for name in order]


def test_blocks_that_run_again_later_are_gathered_again() -> None:
    """Two blocks in turn, twice: between its runs a block is resharded."""
    model = {
        "family": "mlp", "sizes": {"dims": [4, 4, 4], "hidden": 2, "num_classes": 3},
        "uses": {"times": 2, "order": "stack"},
    }
    case = scenario({"name": "zero3", "lookahead": 0}, model=model, frozen=None)
    ops = program_of(case).of_rank(0).steady
    forward = ops[: next(op.index for op in ops if op.kind == "backward")]
    gathered = [op.unit for op in forward if op.kind == "all_gather" and op.micro_batch == 0]
    assert gathered[:5] == ["blocks.0", "blocks.1", "blocks.0", "blocks.1", "root"]
    assert check_laws(zsim.simulate(case)) == len(LAWS)


def test_clipping_waits_for_the_norms_of_all_ranks() -> None:
    ops = program_of(scenario({"name": "zero2"})).of_rank(0).steady
    norms = next(op for op in ops if op.kind == "all_reduce")
    clip = next(op for op in ops[norms.index :] if op.kind == "optimizer")
    assert norms.index in clip.waits
    assert norms.nbytes == 2 * 3  # a norm in bf16 of each of three buffers


def test_gradients_are_copied_where_they_are_reduced_in_another_dtype() -> None:
    ops = program_of(scenario({"name": "zero2"})).of_rank(0).steady
    reductions = [op for op in ops if op.kind == "reduce_scatter"]
    copies = [
        (event.buffer, event.nbytes) for op in ops for event in op.memory
        if isinstance(event, Alloc) and event.buffer.endswith("reduce_input")
    ]
    assert copies == [(f"{op.unit}:reduce_input", op.nbytes) for op in reductions]
