"""ZeRO-3 of which small parameters, or those of small units, stay whole: buffers, order, traffic,
states and formula, counted from shapes alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zsim
from zsim.analysis.alternatives import changes
from zsim.ir.ops import COLLECTIVES
from zsim.memory.formulas import model_state_bytes
from zsim.memory.waterfall import formula_bytes, formula_text, num_whole, state_bytes
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.flat_buffer.groups import Grouping, flat_groups
from zsim.testing.laws import LAWS, check_laws
from zsim.testing.laws.variants import program_of, step_of

MLP = {"family": "mlp", "sizes": {"dims": [3, 5, 4], "hidden": 2, "num_classes": 3}}
"""A head of 12 and 3 elements, a block of 6, 2, 10 and 5, and one of 10, 2, 8 and 4."""
EVEN = {"family": "mlp", "sizes": {"dims": [12, 12], "hidden": 12, "num_classes": 12}}
"""Matrices of 144 elements and biases of 12: 2, 3, 4 or 6 ranks pad nothing."""


def scenario(ranks: int = 4, *, accumulation: int = 1, **tables: Any) -> zsim.Scenario:
    """Two blocks under ZeRO-3, with `strategy` and more."""
    strategy = {"name": "zero3"} | tables.pop("strategy", {})
    return zsim.Scenario(**{
        "model": MLP, "batch": {"micro_batch": 2, "accumulation": accumulation},
        "cluster": {"preset": "cpu-gloo", "ranks": ranks}, "strategy": strategy, **tables,
    })


@pytest.mark.parametrize(("grouping", "sharded", "whole"), [
    (Grouping(), {"root": [12, 3], "blocks.0": [10, 5], "blocks.1": [10, 2, 8, 4],
                  "blocks.0.frozen": [6, 2]}, {}),
    (Grouping(persistence_threshold=5),
     {"root": [12], "blocks.0": [10], "blocks.1": [10, 8], "blocks.0.frozen": [6]},
     {"root.whole": [3], "blocks.0.whole": [5], "blocks.1.whole": [2, 4],
      "blocks.0.frozen.whole": [2]}),
    # the head of 15 elements is small as a unit; a block of 23, with what is frozen, is not
    (Grouping(zero2_threshold=22),
     {"blocks.0": [10, 5], "blocks.1": [10, 2, 8, 4], "blocks.0.frozen": [6, 2]},
     {"root": [12, 3]}),
    (Grouping(zero2_threshold=23, persistence_threshold=2),
     {"blocks.1": [10, 8, 4]},
     {"root": [12, 3], "blocks.0": [10, 5], "blocks.1.whole": [2], "blocks.0.frozen": [6, 2]}),
    (Grouping(granularity="parameter", persistence_threshold=5),
     {"head.weight": [12], "blocks.0.fc2.weight": [10], "blocks.1.fc1.weight": [10],
      "blocks.1.fc2.weight": [8], "blocks.0.fc1.weight": [6]},
     {"head.bias": [3], "blocks.0.fc2.bias": [5], "blocks.1.fc1.bias": [2],
      "blocks.1.fc2.bias": [4], "blocks.0.fc1.bias": [2]}),
    # a bucket of whole parameters is filled by whole ones alone, across units
    (Grouping(granularity=48, persistence_threshold=5),
     {"head.weight": [12], "blocks.0.fc2.weight": [10, 10], "blocks.1.fc2.weight": [8],
      "blocks.0.fc1.weight": [6]},
     {"head.bias": [3, 5, 2, 4], "blocks.0.fc1.bias": [2]}),
], ids=str)
def test_what_stays_whole_lies_in_buffers_of_its_own(
    grouping: Grouping, sharded: dict[str, list[int]], whole: dict[str, list[int]]
) -> None:
    model = scenario(frozen=["blocks.0.fc1.*"]).model
    cut: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}
    for group in flat_groups(model, grouping=grouping, num_shards=4, dtype="float32"):
        cut[group.whole][group.fqn] = list(group.layout.numels)
    assert cut == {False: sharded, True: whole}


def test_whole_buffers_are_gathered_once_after_the_step_and_others_around_their_compute() -> None:
    case = scenario(strategy={"lookahead": 0, "zero2_threshold": 20})
    ops = program_of(case).of_rank(0).steady
    told = {*COLLECTIVES, "forward", "backward", "optimizer"}
    order = [(op.kind, op.unit) for op in ops if op.kind in told]
    assert order == [
        ("all_gather", "blocks.0"), ("forward", "blocks.0"),
        ("all_gather", "blocks.1"), ("forward", "blocks.1"), ("forward", "root"),
        ("backward", "root"), ("reduce_scatter", "root"),
        ("all_gather", "blocks.1"), ("backward", "blocks.1"), ("reduce_scatter", "blocks.1"),
        ("all_gather", "blocks.0"), ("backward", "blocks.0"), ("reduce_scatter", "blocks.0"),
        ("optimizer", "root"), ("all_gather", "root"),
    ]
    step = next(op for op in ops if op.kind == "optimizer")
    assert ops[-1].kind == "free"
    assert next(op for op in reversed(ops) if op.kind == "all_gather").waits == (step.index,)
    assert {unit for op in ops for unit in op.reads} == {"blocks.0", "blocks.1"}


def test_a_frozen_part_that_stays_whole_is_never_gathered() -> None:
    case = scenario(strategy={"persistence_threshold": 6}, frozen=["blocks.0.fc1.*"])
    gathered = {
        op.unit for op in program_of(case).of_rank(0).steady if op.kind == "all_gather"
    }
    assert gathered == {"root", "root.whole", "blocks.0", "blocks.0.whole", "blocks.1",
                        "blocks.1.whole"}


@st.composite
def hybrids(draw: st.DrawFn) -> zsim.Scenario:
    """Any thresholds, cuts, micro-batches and meshes."""
    replicas, shards = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    return scenario(
        replicas * shards, accumulation=draw(st.integers(1, 3)),
        strategy={
            "granularity": draw(st.sampled_from(["unit", "parameter", "60 B"])),
            "lookahead": draw(st.integers(0, 3)), "sync": draw(st.sampled_from(["every", "last"])),
            "persistence_threshold": draw(st.integers(0, 13)),
            "zero2_threshold": draw(st.integers(0, 25)),
            "dp_replicate": replicas, "dp_shard": shards,
        },
        frozen=draw(st.sampled_from([None, ["blocks.0.fc1.*"], ["*.bias"]])),
        precision=draw(st.sampled_from([
            {"parameters": "fp32", "reduce": "fp32"}, {"parameters": "bf16", "reduce": "fp32"}
        ])),
        offload=draw(st.sampled_from([
            None, None, {"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}
        ])),
        optimizer={"name": "adamw", "implementation": "fused"},
    )


@given(hybrids())
def test_traffic_is_that_of_both_stages(case: zsim.Scenario) -> None:
    """Sharded buffers are gathered twice a micro-batch where they are trained, and whole trained
    ones once a step. All gradients are reduced alike."""
    groups = flat_groups(
        case.model, grouping=case.options.grouping, num_shards=case.mesh.dp_shard,
        dtype=case.precision.parameters,
    )
    kept, reduced = (
        DTYPE_NBYTES[dtype] for dtype in (case.precision.parameters, case.precision.reduce)
    )
    times = case.batch.accumulation if case.sync == "every" else 1
    expected = Counter[str]()
    for group in groups:
        if group.trained:
            expected[f"reduce_scatter {group.fqn}"] = times
            expected[f"all_gather {group.fqn}"] = 1 if group.whole else 2 * case.batch.accumulation
    sizes = {group.fqn: group.layout.padded_numel for group in groups}
    seen = Counter[str]()
    for op in program_of(case).of_rank(0).steady:
        if op.group == "dp_shard" and op.unit in sizes and not op.unit.endswith("frozen"):
            seen[f"{op.kind} {op.unit}"] += 1
            assert op.nbytes == sizes[op.unit] * (kept if op.kind == "all_gather" else reduced)
    frozen = {group.fqn for group in groups if not group.trained}
    gathered = {name.split()[1] for name in seen} & frozen
    assert not gathered & {group.fqn for group in groups if group.whole}
    assert {name: n for name, n in seen.items() if name.split()[1] not in frozen} == expected


@settings(max_examples=40)
@given(hybrids())
def test_every_hybrid_obeys_all_laws(case: zsim.Scenario) -> None:
    assert check_laws(zsim.simulate(case)) == len(LAWS)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("thresholds", "whole", "text"), [
    ({}, 0, "16Ψ/{}"), ({"persistence_threshold": 12}, 36, "2Ψw + 2(Ψ − Ψw)/{} + 14Ψ/{}"),
    ({"zero2_threshold": 156}, 156, "2Ψw + 2(Ψ − Ψw)/{} + 14Ψ/{}"),
    ({"zero2_threshold": 10**12}, 468, "2Ψ + 14Ψ/{}"),
])
def test_states_are_the_formulas_but_for_step_counters(
    thresholds: dict[str, int], whole: int, text: str, shards: int
) -> None:
    case = scenario(
        shards, model=EVEN, strategy=thresholds, precision={"parameters": "bf16", "reduce": "fp32"}
    )
    (memory,) = step_of(case).memory
    counters = 4 * len(flat_groups(
        case.model, grouping=case.options.grouping, num_shards=shards, dtype="bfloat16"
    ))
    assert num_whole(case) == whole
    assert formula_text(case) == text.format(shards, shards)
    assert sum(memory.held.values()) - counters == formula_bytes(case) == model_state_bytes(
        468, stage="zero3", num_ranks=shards, state=state_bytes(case), num_whole=whole
    )


@pytest.mark.parametrize(("value", "message"), [
    (-1, "greater than or equal to 0"), (10**13, "less than or equal to 1000000000000"),
    ("small", "valid integer"),
])
def test_thresholds_are_whole_numbers_within_bounds(value: Any, message: str) -> None:
    for key in ("persistence_threshold", "zero2_threshold"):
        with pytest.raises(zsim.ScenarioError) as refusal:
            scenario(strategy={key: value})
        assert key in str(refusal.value)


def test_without_room_it_is_advised_to_shard_what_stays_whole() -> None:
    case = scenario(strategy={"zero2_threshold": 20})
    advised = dict(changes(case))["zero2_threshold = 0: small units are sharded too"]
    assert advised.options.zero2_threshold == 0
    assert not [name for name, _ in changes(case) if name.startswith("persistence_threshold")]


def test_stages_that_shard_no_parameters_have_no_threshold() -> None:
    for name in ("zero1", "zero2"):
        with pytest.raises(zsim.ScenarioError, match="zero2_threshold: an option of zero3 alone"):
            scenario(strategy={"name": name, "zero2_threshold": 5})
