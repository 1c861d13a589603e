"""DeepSpeed's three stages: closed forms of their bytes, the order of buckets and gathers,
refusals."""

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.folders import ROOT
from zsim import simulate
from zsim.analysis.alternatives import moved
from zsim.analysis.scenario_warnings import caveats
from zsim.errors import ScenarioError
from zsim.ir.buffers import role_of
from zsim.ir.laws import program_laws
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import Alloc, Free, Op
from zsim.models.called_modules import by_block, granular
from zsim.models.spec import Parameter
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan, training
from zsim.scenario.scenario import Scenario
from zsim.strategies.deepspeed_engine.options import HOOKS
from zsim.strategies.deepspeed_engine.partition import FlatPartition, buckets
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.deepspeed_engine.shards.quantized import num_scales
from zsim.strategies.replicated.buckets import ready_order
from zsim.testing.laws import breaches

GPT = {"family": "gpt", "sizes": {"num_layers": 3, "hidden_size": 8, "num_heads": 2,
                                  "vocabulary": 13}}


def scenario(
    *, ranks: int = 2, accumulation: int = 1, cluster: dict[str, Any] | None = None, **tables: Any
) -> Scenario:
    strategy = {"name": "deepspeed2", "reduce_bucket_size": 300} | tables.pop("strategy", {})
    return Scenario(
        model=tables.pop("model", GPT), strategy=strategy,
        batch={"micro_batch": 2, "sequence_length": 4, "accumulation": accumulation}
        | tables.pop("batch", {}),
        cluster=cluster or {"preset": "cpu-gloo", "ranks": ranks}, **tables,
    )


def flat_of(case: Scenario) -> FlatPartition:
    return FlatPartition.of(
        training(case, device="cpu"), mesh=case.mesh, options=case.options
    )


@given(st.integers(1, 9), st.booleans())
def test_parts_hold_each_element_once_and_padding_is_behind_all(ranks: int, deals: bool) -> None:
    flat = flat_of(scenario(ranks=ranks, strategy={"round_robin_gradients": deals}))

    assert sum(sum(share.pieces) for share in flat.shares) == flat.numel
    assert all(sum(share.pieces) + share.padding == flat.part_numel for share in flat.shares)
    assert flat.part_numel % 2 == 0
    assert flat.padded_numel - flat.numel < 2 * ranks
    assert {p.fqn for p in flat.laid_out} == {p.fqn for p in flat.parameters}


def test_round_robin_deals_parameters_out_in_turn() -> None:
    flat = flat_of(scenario(ranks=3, strategy={"round_robin_gradients": True}))
    assert flat.laid_out[: len(flat.parameters[::3])] == flat.parameters[::3]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_a_bucket_closes_before_the_gradient_that_would_overflow_it(
    numels: list[int], limit: int
) -> None:
    order = [Parameter(fqn=f"p{i}", shape=(n,)) for i, n in enumerate(numels)]
    made = buckets(order, most=limit)

    assert [p for bucket in made for p in bucket.parameters] == order
    assert all(b.numel <= limit or len(b.parameters) == 1 for b in made)
    assert all(
        before.numel + after.parameters[0].numel > limit
        for before, after in zip(made, made[1:], strict=False)
    )
    assert all(bucket.in_buffer == (bucket.numel <= limit) for bucket in made)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_stage_1_reduces_once_in_the_order_of_the_model_and_stage_2_after_each_micro_batch(
    stage: int, accumulation: int
) -> None:
    case = scenario(accumulation=accumulation, strategy={"name": f"deepspeed{stage}"})
    flat = flat_of(case)
    order = flat.parameters if stage == 1 else ready_order(flat.training)
    once = [
        4 * sum(slices)
        for bucket in buckets(order, most=300, flat=flat) for slices in bucket.reductions
    ]
    steady = plan(case, device="cpu").of_rank(0).steady

    reduced = [op.nbytes for op in steady if op.kind == "all_reduce"]
    assert reduced == [*once * (accumulation if stage == 2 else 1), 4]  # the norm is the last
    assert [op.nbytes for op in steady if op.kind == "all_gather"] == [4 * flat.padded_numel]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_from_step_to_step_follow_the_closed_form(ranks: int, dtype: str) -> None:
    """Ψ of parameters, and 12 bytes an element of a rank's part: master copy and AdamW's states. A
    step counter and the global norm are 4 bytes each."""
    case = scenario(ranks=ranks, precision={"parameters": dtype, "reduce": dtype})
    flat = flat_of(case)
    program = plan(case, device="cpu")
    for rank in range(ranks):
        held = replay(program.of_rank(rank))["steady"]
        expected = flat.padded_numel * flat.element + 12 * flat.part_numel + 4 + 4
        assert (held.start_bytes, held.end_bytes) == (expected, expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_buffers_of_buckets_are_as_large_as_the_option_whatever_the_model(
    overlap: bool
) -> None:
    case = scenario(strategy={"reduce_bucket_size": 500_000, "overlap_comm": overlap})
    made = [
        event.nbytes
        for op in plan(case, device="cpu").of_rank(0).steady for event in op.memory
        if isinstance(event, Alloc) and event.buffer.startswith("bucket:")
    ]
    assert made == [4 * 500_000] * (1 + overlap)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_r_s_constant_buffers_have_the_same_bytes_in_models_of_any_size(stage: int) -> None:
    """C_B: bytes of the option reduce_bucket_size, in float32, and none of the model's."""
    sizes = GPT["sizes"]
    models = [{**GPT, "sizes": {**sizes, "hidden_size": width}} for width in (8, 32)]  # 13 x
    made = [
        [
            event.nbytes
            for phase in (rank.construction, rank.steady) for op in phase for event in op.memory
            if isinstance(event, Alloc) and event.buffer.partition(":")[0] == "bucket"
        ]
        for model in models
        for rank in [plan(scenario(
            model=model, strategy={"name": f"deepspeed{stage}", "reduce_bucket_size": 60_000}
        ), device="cpu").of_rank(0)]
    ]
    assert made == [[4 * 60_000]] * 2


def test_whole_gradients_are_kept_where_they_reach_into_the_part() -> None:
    case = scenario(ranks=4)
    flat, program = flat_of(case), plan(case, device="cpu")
    for rank, share in enumerate(flat.shares):
        kept = [
            event.nbytes
            for op in program.of_rank(rank).steady for event in op.memory
            if isinstance(event, Alloc) and event.buffer == "part.gradients"
        ]
        assert kept == [4 * share.touched_numel]


def test_buckets_may_fill_before_the_last_recomputation_of_their_unit() -> None:
    case = scenario(
        accumulation=2, wrapping={"every": "all", "ends": "root"},
        strategy={"reduce_bucket_size": 20, "reduce_scatter": False},
        activation_checkpointing={"mode": "selective", "recompute": ["attention", "layer_norm"]},
    )
    program, flat = plan(case, device="cpu"), flat_of(case)
    for rank, share in enumerate(flat.shares):
        steady = program.of_rank(rank).steady
        events = [event for op in steady for event in op.memory]
        assert not any(role_of(event.buffer) == "own" for event in events)
        kept = [e.nbytes for e in events if isinstance(e, Alloc) and e.buffer == "part.gradients"]
        assert kept == [4 * share.touched_numel]
        replay(program.of_rank(rank))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"strategy": {"contiguous_gradients": False}},
         "strategy.contiguous_gradients: expected true, found false"),
        ({"precision": {"autocast": "bf16"}},
         "precision.autocast: expected none with DeepSpeed's engine, which switches it off"),
        ({"strategy": {"gradient_clipping": 1.0}},
         "strategy.gradient_clipping: this is optimizer.clip_norm"),
        ({"strategy": {"communication_data_type": "fp32"}},
         "strategy.communication_data_type: this is precision.reduce"),
        ({"strategy": {"cpu_offload": True}},
         "strategy.cpu_offload: this is the table offload"),
        ({"strategy": {"reduce_bucket_size": 10**13}},
         "strategy.reduce_bucket_size: expected at most 1,000,000,000,000"),
        ({"strategy": {"reduce_bucket_sise": 3}},
         "strategy.reduce_bucket_sise: unknown key, did you mean reduce_bucket_size?"),
        ({"strategy": {"sync": "last"}}, "strategy.sync: expected"),
        ({"precision": {"parameters": "bf16", "master": False}}, "precision.master: expected true"),
        ({"model": GPT | {"unused": ["blocks.1"]}}, "model.unused: expected none with DeepSpeed's"),
    ],
)
def test_what_the_engine_or_its_model_has_not_is_refused_by_name(
    changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(**changed)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["deepspeed1", "deepspeed2", "deepspeed3"])
@pytest.mark.parametrize("offload", [{}, {"optimizer": "cpu"}])
def test_ranks_agree_by_a_byte_whether_gradients_overflow(
    name: str, offload: dict[str, str]
) -> None:
    """Gradients of fp16 do always, of bf16 by check_grad_overflow, which stage 3 does not read."""
    told = {}
    unchecked = {} if name == "deepspeed3" else {"check_grad_overflow": False}
    for dtype, more in (("fp16", unchecked), ("bf16", unchecked), ("bf16, checked", {})):
        reduced = dtype.partition(",")[0]
        case = scenario(
            strategy={"name": name} | more, precision={"parameters": reduced, "reduce": reduced},
            offload=offload,
        )
        steady = plan(case, device="cpu").of_rank(0).steady
        optimizer = min(op.index for op in steady if op.kind == "optimizer")
        told[dtype] = [
            op.nbytes for op in steady[optimizer:] if op.kind == "all_reduce"
        ]
    assert told["fp16"] == [1, *told["bf16"]]
    assert told["bf16, checked"] == told["bf16" if name == "deepspeed3" else "fp16"]


def test_several_forwards_before_a_backward_are_refused() -> None:
    with pytest.raises(ScenarioError, match="batch.forwards: expected 1 with deepspeed2"):
        Scenario(
            model=GPT, batch={"micro_batch": 2, "sequence_length": 4, "forwards": 2},
            cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": "deepspeed2"},
        )


# -- stage 3


def sharded(
    *, ranks: int = 2, accumulation: int = 1, model: dict[str, Any] = GPT,
    cluster: dict[str, Any] | None = None, **strategy: Any,
) -> Scenario:
    return scenario(
        ranks=ranks, accumulation=accumulation, model=model, cluster=cluster,
        strategy={"name": "deepspeed3", "stage3_param_persistence_threshold": 0} | strategy,
    )


def gathered(case: Scenario, phase: str = "steady") -> list[int]:
    """Bytes of the all-gathers of a step, in order."""
    rank = plan(case, device="cpu").of_rank(0)
    return [op.nbytes for op in getattr(rank, phase) if op.kind == "all_gather"]


def padded(parameters: Any, ranks: int = 2) -> int:
    return sum(4 * ranks * -(-parameter.numel // ranks) for parameter in parameters)


def test_hpzs_copies_of_frozen_parameters_that_no_backward_needs_stay() -> None:
    apart = {**GPT, "sizes": {**GPT["sizes"], "tied": False}}
    case = sharded(model=apart, zero_hpz_partition_size=2).with_(frozen=["w?e.*", "blocks.0.*"])
    assert program_laws.breaches(plan(case, device="cpu")) == ()


def test_without_gathering_ahead_each_module_is_gathered_in_both_passes() -> None:
    """Also the table that embedding and head share, by either."""
    case = sharded(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    modules = [padded(unit.parameters) for unit in case.model.units]
    assert len(modules) == 2 + 3 * 8 + 1  # tables, in each block two norms and six linears, a norm
    table = modules[0]

    assert gathered(case) == [*modules, table, table, *reversed(modules)]
    assert gathered(case, "first") == gathered(case)


MLP = {"family": "mlp", "sizes": {"dims": [5, 7, 6], "hidden": 9, "num_classes": 3}}
UNTIED = GPT | {"sizes": GPT["sizes"] | {"tied": False}}
CONFIGS = ROOT / "tests/measured/deepspeed_models"
HUB = tuple({"huggingface": str(file)} for file in sorted(CONFIGS.iterdir()))


@pytest.mark.parametrize("layers", [2, 80])
def test_a_step_gathers_as_often_as_it_has_modules_with_parameters(layers: int) -> None:
    """A block of llama has two norms and seven linears. Gathers of blocks would be 2(L + 1)."""
    sizes = {"num_layers": layers, "hidden_size": 8, "num_heads": 2, "vocabulary": 16,
             "feed_forward": 8}
    case = sharded(
        model={"family": "llama", "sizes": sizes}, stage3_prefetch_bucket_size=0,
        stage3_max_reuse_distance=0,
    )
    assert len(gathered(case)) == 2 * (9 * layers + 3)


def test_gathers_of_small_modules_take_their_latency_each() -> None:
    """2(9L + 3) gathers, one behind the other. Time grows by 18 of them and of the engine's hooks a
    layer, and is no less than all their latencies. Gathers of blocks, 2(L + 1), would take a ninth.
    """
    times, latency = {}, 0
    for layers in (2, 10):
        sizes = {"num_layers": layers, "hidden_size": 64, "num_heads": 2, "vocabulary": 64,
                 "feed_forward": 64}
        case = sharded(
            model={"family": "llama", "sizes": sizes}, stage3_prefetch_bucket_size=0,
            stage3_max_reuse_distance=0, reduce_bucket_size=10**6,
            cluster={"preset": "dgx-a100", "nodes": 2},
        )
        run = SimBackend().run(case, options=RunOptions())
        times[layers] = run.step_time_ns
        spans = [s.end_ns - s.start_ns for s in run.ranks[0].spans if s.kind == "all_gather"]
        assert len(spans) == 2 * (9 * layers + 3)
        latency = min(spans)
        assert times[layers] >= len(spans) * latency
    hook = case.cluster.overheads.issue_hook * HOOKS
    assert latency <= (times[10] - times[2]) / (8 * 18) <= 4 * latency + hook


@pytest.mark.parametrize("model", [GPT, UNTIED, MLP, *HUB])
def test_a_model_by_module_is_again_the_one_by_block(model: dict[str, Any]) -> None:
    blocks, called = (
        Scenario(
            model=model, strategy={"name": name}, cluster={"preset": "cpu-gloo", "ranks": 2},
            batch={"micro_batch": 2} | ({} if model is MLP else {"sequence_length": 4}),
        )
        for name in ("zero3", "deepspeed3")
    )
    assert by_block(called.model) == blocks.model
    assert set(called.model.parameters) == set(blocks.model.parameters)
    assert moved(called, "zero3").model == blocks.model
    assert moved(blocks, "deepspeed3").model == called.model


def test_with_room_for_all_nothing_is_gathered_in_backward() -> None:
    case = sharded(model=UNTIED)
    total = padded(case.model.parameters)
    assert sum(gathered(case)) == total
    assert sum(gathered(case, "first")) == 2 * total  # which records the trace


@given(
    st.sampled_from([0, 60, 300, 10**6]), st.sampled_from([0, 600, 10**9]),
    st.sampled_from([0, 500, 10**9]),
)
def test_more_is_never_gathered_than_each_parameter_in_each_pass(
    ahead: int, live: int, reuse: int
) -> None:
    case = sharded(
        model=UNTIED, stage3_prefetch_bucket_size=ahead, stage3_max_live_parameters=live,
        stage3_max_reuse_distance=reuse,
    )
    total = padded(case.model.parameters)
    assert total <= sum(gathered(case)) <= 2 * total


def test_small_parameters_are_gathered_after_the_step_one_by_one() -> None:
    case = sharded(stage3_param_persistence_threshold=8)
    small = [p for p in case.model.named_parameters if p.numel <= 8]
    steady = plan(case, device="cpu").of_rank(0).steady
    after = max(op.index for op in steady if op.kind == "optimizer")

    assert [op.unit for op in steady if op.kind == "all_gather" and op.index > after] == [
        parameter.fqn for parameter in small
    ]


def test_small_parameters_stay_whole_until_all_have_too_many_elements() -> None:
    """A weight that is too large for what is left is passed by, and later biases stay."""
    case = scenario(strategy={
        "name": "deepspeed3", "stage3_param_persistence_threshold": 64,
        "stage3_model_persistence_threshold": 84,
    })
    sharded = ShardedParameters.of(
        training(case, device="cpu"), mesh=case.mesh, options=case.options
    )
    attention = [f"blocks.0.attn.{name}.bias" for name in ("q", "k", "v", "proj")]
    assert [parameter.fqn for parameter in sharded.persistent] == [
        "wpe.weight", "blocks.0.ln_1.weight", "blocks.0.ln_1.bias", *attention
    ]
    assert sum(parameter.numel for parameter in sharded.persistent) == 80


def test_recomputed_blocks_gather_their_modules_once_more() -> None:
    """The last linear of a block is whole when its recomputation comes to it."""
    plain, again = (
        scenario(
            model=UNTIED, strategy={
                "name": "deepspeed3", "stage3_prefetch_bucket_size": 0,
                "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
            }, activation_checkpointing={"mode": mode},
        )
        for mode in ("none", "full")
    )
    assert len(gathered(again)) - len(gathered(plain)) == 3 * (8 - 1)
    held = [replay(plan(case, device="cpu").of_rank(0))["steady"] for case in (plain, again)]
    assert held[0].end_bytes == held[1].end_bytes


def test_a_release_frees_what_was_gathered_for_a_linear() -> None:
    """DeepSpeed's linear saves its parameters, and not the memory of forward. So a deep model has
    no more of it at a time than a flat one."""
    peaks = []
    for layers in (4, 8):
        sizes = GPT["sizes"] | {"num_layers": layers, "hidden_size": 64, "tied": False}
        case = sharded(
            ranks=16, model=GPT | {"sizes": sizes}, stage3_prefetch_bucket_size=0,
            stage3_max_reuse_distance=0,
        )
        live, most = {}, 0
        for op in plan(case, device="cuda").of_rank(0).steady:
            for event in op.memory:
                if isinstance(event, Alloc) and event.kind == "unsharded_parameters":
                    live[event.buffer] = event.nbytes
                elif not isinstance(event, Alloc):
                    live.pop(event.buffer, None)
            most = max(most, sum(live.values()))
        peaks.append(most)
    assert peaks[0] == peaks[1] <= 4 * 2 * (64 * 256 + 256)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_of_stage_3_from_step_to_step_follow_the_closed_form(ranks: int, dtype: str) -> None:
    """Shards and their gradients; 12 bytes an element for master copy and AdamW's states; a bucket,
    a flag, a step counter and a float64 norm."""
    case = scenario(
        ranks=ranks, precision={"parameters": dtype, "reduce": dtype},
        strategy={"name": "deepspeed3", "stage3_param_persistence_threshold": 0},
    )
    element = 4 if dtype == "fp32" else 2
    shards = sum(-(-parameter.numel // ranks) for parameter in case.model.parameters)
    held = replay(plan(case, device="cpu").of_rank(0))["steady"]

    expected = shards * (2 * element + 12) + 300 * element + 1 + 4 + 8
    assert (held.start_bytes, held.end_bytes) == (expected, expected)


def test_ranks_assert_that_their_traces_are_the_same_before_they_follow_them() -> None:
    rank = plan(sharded(), device="cpu").of_rank(0)
    modules, containers = len(sharded().model.units), 1 + 3
    steps, uses = 2 * (modules + 1 + containers), 2 * (len(sharded().model.parameters) + 1)
    assert [op.nbytes for op in rank.first if op.unit == "trace"] == [8]
    assert [op.nbytes for op in rank.second] == [8, 8 * steps, 8, 8 * uses, 8, 8 * uses]


def test_what_is_gathered_ahead_of_a_break_is_in_vain_and_each_use_behind_it_gathers_anew() -> None:
    """The first gather ahead has everything. Tables stay whole, as the trace had their backward."""
    case = sharded(model=UNTIED, trace="breaks", stage3_prefetch_bucket_size=10**6)
    modules = [padded(unit.parameters) for unit in case.model.units][2:]
    everything = padded(case.model.parameters)

    assert gathered(case) == [everything, *modules, *reversed(modules)]
    first = plan(case, device="cpu").of_rank(0).first
    at = next(op.index for op in first if op.kind == "forward" and op.unit.startswith("blocks.0"))
    assert not [op for op in first[:at] if op.nbytes == everything]


def test_micro_batches_of_a_trace_that_breaks_record_and_break_in_turn() -> None:
    once, twice, thrice = (
        plan(sharded(trace="breaks", accumulation=number), device="cpu").of_rank(0)
        for number in (1, 2, 3)
    )

    def lists(ops: Iterable[Op]) -> list[int]:
        return [op.micro_batch for op in ops if op.unit == "trace"]

    assert (lists(once.first), lists(once.steady), once.second) == ([0], [0] * 6, ())
    assert lists(twice.first) == lists(twice.steady) == [0] + [1] * 6
    assert lists(thrice.first) == [0] + [1] * 6 + [2]
    assert lists(thrice.steady) == [0] * 6 + [1] + [2] * 6


def test_a_trace_that_breaks_is_told_with_its_remedy() -> None:
    told = [str(each) for each in caveats(sharded(trace="breaks"))]
    assert [text for text in told if 'mended by leaf_module = "blocks"' in text]
    assert not [text for text in map(str, caveats(sharded())) if "leaf_module" in text]


def test_copies_of_what_is_gathered_in_vain_are_those_of_the_block_that_comes_last() -> None:
    """hpZ: the first block of the recorded order is the last one of the next. A part of the second
    one was gathered as well."""
    case = sharded(
        model=UNTIED, ranks=4, trace="breaks", stage3_prefetch_bucket_size=300,
        zero_hpz_partition_size=2,
    )
    ops = plan(case, device="cpu").of_rank(0).steady
    begin = next(op.index for op in ops if op.unit.startswith("blocks.") and op.kind == "forward")
    copied = [op.unit.partition(":")[0] for op in ops[:begin] if op.unit.endswith(":secondary")]
    last = [p.fqn for p in case.model.parameters if p.fqn.startswith("blocks.2.")]
    assert list(dict.fromkeys(copied)) == [*last, "blocks.0.ln_1.weight"]
    gathers = [op.group for op in ops if op.kind == "all_gather"]
    forward = gathers[3 : gathers.index("dp_shard:2", 4) + 9]  # behind those ahead
    assert forward == ["dp_shard:2", *["dp_shard"] * 16, *["dp_shard:2"] * 8, "dp_shard"]


@pytest.mark.parametrize("more", [
    {}, {"leaf_module": "blocks"}, {"zero_hpz_partition_size": 2},
])
@pytest.mark.parametrize("ahead", [0, 300, 10**6])
def test_programs_of_a_trace_that_breaks_obey_every_law(ahead: int, more: dict[str, Any]) -> None:
    case = sharded(trace="breaks", stage3_prefetch_bucket_size=ahead, accumulation=2, **more)
    assert program_laws.breaches(plan(case, device="cpu")) == ()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_copies_in_larger_shards_are_gathered_from_until_the_step(accumulation: int) -> None:
    """hpZ: only the first forward gathers over all ranks, and others over h neighbours. Copies of
    1/h of each parameter live from its release to the step."""
    case = sharded(
        ranks=4, accumulation=accumulation, stage3_prefetch_bucket_size=0,
        stage3_max_reuse_distance=0, zero_hpz_partition_size=2,
    )
    program = plan(case, device="cpu")
    gathers = [op for op in program.of_rank(0).steady if op.kind == "all_gather"]
    over_all = [op.nbytes for op in gathers if op.group == "dp_shard"]
    assert sum(over_all) == padded(case.model.parameters, 4)
    assert {op.group for op in gathers[len(over_all) :]} == {"dp_shard:2"}
    plain = gathered(sharded(
        ranks=4, accumulation=accumulation, stage3_prefetch_bucket_size=0,
        stage3_max_reuse_distance=0,
    ))
    assert [op.nbytes for op in gathers] == plain
    copied = [
        event.nbytes for op in program.of_rank(0).steady for event in op.memory
        if isinstance(event, Alloc) and event.buffer.endswith(":secondary")
    ]
    assert sum(copied) == padded(case.model.parameters, 4) // 2
    assert replay(program.of_rank(0))["steady"].end_bytes == replay(
        plan(sharded(ranks=4), device="cpu").of_rank(0)
    )["steady"].end_bytes


WIDE = {"family": "gpt", "sizes": {"num_layers": 2, "hidden_size": 128, "num_heads": 2,
                                   "vocabulary": 64, "tied": False}}


IN_BF16 = {"precision": {"parameters": "bf16", "reduce": "bf16"}}


def in_two_nodes(tables: Mapping[str, Any] = IN_BF16, **strategy: Any) -> Scenario:
    return scenario(
        ranks=16, model=WIDE, **tables, strategy={
            "name": "deepspeed3", "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0, **strategy,
        },
    )


def over_all_ranks(case: Scenario) -> int:
    """Bytes of gathers and reductions of a step that cross nodes of eight ranks."""
    return sum(
        op.nbytes for op in plan(case, device="cuda").of_rank(0).steady
        if op.kind in ("all_gather", "reduce_scatter") and op.group == "dp_shard"
    )


def test_gathers_in_int8_have_half_of_the_bytes_and_a_scale_for_each_group() -> None:
    case = in_two_nodes(zero_quantized_weights=True)
    steady = plan(case, device="cuda").of_rank(0).steady
    sent = [op for op in steady if op.kind == "all_gather"]
    plain = gathered_in(in_two_nodes(), "bfloat16")
    assert [op.nbytes for op in sent if op.dtype == "int8"] == [nbytes // 2 for nbytes in plain]
    assert [op.nbytes for op in sent if op.dtype == "float32"] == [
        4 * 16 * num_scales(nbytes // 2 // 16) for nbytes in plain
    ]
    held = replay(plan(case, device="cuda").of_rank(0))["steady"]
    assert held.start_bytes == held.end_bytes
    # DeepSpeed's own kernels load 16 bytes at once; torch's casts to wider dtypes do not
    widened = [
        kernel for op in steady if op.kind == "copy" and (op.unit or "").startswith("gather")
        for kernel in op.kernels
    ]
    assert widened
    assert not any(kernel.singly for kernel in widened)


def test_what_a_rank_sends_in_int8_goes_with_the_wait_of_nccl_and_with_the_gather_of_gloo() -> None:
    gone = {
        device: {
            op.kind for op in plan(in_two_nodes(zero_quantized_weights=True), device=device)
            .of_rank(0).steady for event in op.memory
            if isinstance(event, Free) and role_of(event.buffer) == "sent_scales"
        }
        for device in ("cuda", "cpu")
    }
    assert gone == {"cuda": {"copy"}, "cpu": {"free"}}


def test_a_gather_whose_shards_make_no_groups_of_eight_is_named() -> None:
    """DeepSpeed: `Qantized weight requires the number of weights be a multiple of 8`."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocabulary": 24}
    quantized = {"name": "deepspeed3", "zero_quantized_weights": True}
    case = {"model": {"family": "gpt", "sizes": sizes}, "strategy": quantized}
    assert plan(scenario(**case), device="cpu")
    with pytest.raises(ScenarioError) as error:
        plan(scenario(ranks=4, **case), device="cpu")
    assert str(error.value).startswith(
        "scenario: strategy.zero_quantized_weights: expected multiples of 8 elements in gathers, "
        "found 68 on each rank of blocks.0.attn.q.weight and blocks.0.attn.q.bias, where DeepSpeed "
        "fails"
    )


def test_a_parameter_gathered_alone_whose_padding_moves_the_ends_of_groups_is_named() -> None:
    """A norm of 240 on 32 ranks of 8 elements each: 32 scales divide 240 into groups of 7."""
    def of_width(width: int) -> Scenario:
        return Scenario(
            model={"family": "llama", "sizes": {
                "num_layers": 1, "hidden_size": width, "num_heads": 2, "feed_forward": 512,
                "vocabulary": 256,
            }},
            batch={"micro_batch": 1, "sequence_length": 16},
            cluster={"preset": "dgx-a100", "nodes": 4},
            strategy={"name": "deepspeed3", "zero_quantized_weights": True},
            precision={"parameters": "fp16", "reduce": "fp16"},
        )

    assert plan(of_width(256), device="cuda")
    with pytest.raises(ScenarioError) as error:
        plan(of_width(240), device="cuda")
    assert str(error.value).startswith(
        "scenario: strategy.zero_quantized_weights: expected no padding in gathers of one "
        "parameter, found 16 elements behind blocks.0.norm_1.weight, of which DeepSpeed makes wrong"
    )


def gathered_in(case: Scenario, dtype: str) -> list[int]:
    steady = plan(case, device="cuda").of_rank(0).steady
    return [op.nbytes for op in steady if op.kind == "all_gather" and op.dtype == dtype]


@given(st.integers(1, 10**9))
def test_groups_of_quantized_elements_are_even_and_as_few_as_8000_elements_allow(
    eighths: int
) -> None:
    groups = num_scales(8 * eighths)
    assert eighths % groups == 0
    assert 8 * eighths <= 8000 * groups
    larger = (n for n in range(eighths // groups + 1, 1001) if eighths % n == 0)
    assert next(larger, None) is None


ON_TWO_NODES = {
    "batch": {"sequence_length": 16},
    "cluster": {"preset": "cpu-gloo", "nodes": 2, "ranks": 16},
    "precision": {"parameters": "bf16", "reduce": "fp16"},
}
ZEROPP = {
    "zero_quantized_weights": True, "zero_hpz_partition_size": 8, "zero_quantized_gradients": True,
}


def test_zeropp_sends_a_quarter_of_zero3_between_nodes() -> None:
    """ZeRO-3 sends 3M: a gather in each pass, and gradients. hpZ leaves out M, qwZ a half, and qgZ
    three quarters of gradients: 0.75M (ZeRO++, arXiv 2306.10209, table 1). Biases and norms are
    reduced as they are."""
    plain, all_ = in_two_nodes(ON_TWO_NODES), in_two_nodes(ON_TWO_NODES, **ZEROPP)
    matrices = 2 * sum(p.numel for p in all_.model.parameters if len(p.shape) > 1)
    vectors = 2 * all_.model.num_parameters - matrices
    assert over_all_ranks(plain) == 3 * (matrices + vectors)
    steady = plan(all_, device="cuda").of_rank(0).steady
    of_kind = {
        (kind, dtype): sum(
            op.nbytes for op in steady
            if (op.kind, op.dtype) == (kind, dtype) and op.group in ("dp_shard", "dp_shard/8")
        )
        for kind, dtype in product(
            ("all_gather", "all_to_all", "reduce_scatter"), ("int8", "float32", "float16")
        )
    }
    assert of_kind["all_gather", "int8"] == (matrices + vectors) // 2
    assert 8 * of_kind["all_to_all", "int8"] == matrices // 4  # eight ranks of a node
    assert of_kind["reduce_scatter", "float16"] == vectors
    assert of_kind["all_gather", "float32"] < (matrices + vectors) // 100
    assert 8 * of_kind["all_to_all", "float32"] < matrices // 20


def test_quantized_gradients_cross_both_all_to_alls_with_a_scale_for_each_row() -> None:
    """128 × 512 elements: int4 is 32,768 B, and each of 512 rows has a scale. Behind the exchange
    inside a node of 8 an eighth of both is left."""
    steady = plan(in_two_nodes(ON_TWO_NODES, **ZEROPP), device="cuda").of_rank(5).steady
    sent = [(op.group, op.nbytes, op.dtype) for op in steady if op.kind == "all_to_all"]
    of_matrix = [
        ("dp_shard:8", 32_768, "int8"), ("dp_shard:8", 2048, "float32"),
        ("dp_shard/8", 4096, "int8"), ("dp_shard/8", 256, "float32"),
    ]
    assert sum(sent[i : i + 4] == of_matrix for i in range(0, len(sent), 4)) == 4
    assert {group for group, _, _ in sent} == {"dp_shard:8", "dp_shard/8"}


def test_on_nodes_of_one_rank_quantized_gradients_cross_all_ranks_once() -> None:
    tables = ON_TWO_NODES | {"cluster": {"preset": "cpu-gloo", "nodes": 16, "ranks": 16}}
    steady = plan(
        in_two_nodes(tables, zero_quantized_gradients=True), device="cuda"
    ).of_rank(3).steady
    sent = [(op.group, op.nbytes) for op in steady if op.kind == "all_to_all"]
    assert {group for group, _ in sent} == {"dp_shard"}
    assert sent.count(("dp_shard", 128 * 512 // 2)) == 4


def test_on_one_node_and_without_them_gradients_are_reduced_alike() -> None:
    same = in_two_nodes(zero_quantized_gradients=True)
    assert str(plan(same, device="cuda")) == str(plan(in_two_nodes(), device="cuda"))


@pytest.mark.parametrize("more", [{}, {"offload": {"optimizer": "cpu"}},
                                  {"strategy": {"overlap_comm": False}}])
def test_programs_with_all_of_zeropp_obey_every_law(more: dict[str, Any]) -> None:
    case = in_two_nodes(ON_TWO_NODES, **ZEROPP).with_(**more)
    for device in ("cpu", "cuda"):
        assert program_laws.breaches(plan(case, device=device)) == ()


@pytest.mark.parametrize("preset", ["cpu-gloo", "dgx-h100", "pcie-box"])
def test_runs_with_quantized_gradients_obey_every_law(preset: str) -> None:
    cluster = {"preset": preset, "nodes": 2} | ({"ranks": 16} if preset == "cpu-gloo" else {})
    run = simulate(in_two_nodes(ON_TWO_NODES | {"cluster": cluster}, **ZEROPP), all_ranks=True)
    assert list(breaches(run)) == []
    assert run.collectives.count("all_to_all") > 0


@pytest.mark.parametrize(("cluster", "precision", "sizes", "told"), [
    ({"ranks": 15}, {}, {}, "expected full nodes, found 15 ranks on nodes of 8"),
    ({}, {"reduce": "bf16"}, {}, "precision.reduce: expected \"fp16\" with"),
    ({}, {}, {"vocabulary": 50},
     "found wte.weight of 50 × 128, where DeepSpeed fails; pad it"),
    ({}, {}, {"hidden_size": 60}, "found wte.weight of 64 × 60"),
])
def test_quantized_gradients_that_fail_in_deepspeed_are_refused(
    cluster: dict[str, Any], precision: dict[str, Any], sizes: dict[str, Any], told: str
) -> None:
    model = WIDE | {"sizes": WIDE["sizes"] | sizes}
    with pytest.raises(ScenarioError) as error:
        scenario(
            model=model, batch=ON_TWO_NODES["batch"], cluster=ON_TWO_NODES["cluster"] | cluster,
            precision=ON_TWO_NODES["precision"] | precision,
            strategy={"name": "deepspeed3", "zero_quantized_gradients": True},
        )
    assert told in str(error.value)


def test_a_leaf_block_is_one_gather_and_reduces_in_the_order_of_the_model() -> None:
    strategy = {
        "name": "deepspeed3", "reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
    }
    leaves = scenario(strategy=strategy | {"leaf_module": "blocks"})
    blocks = {
        unit.fqn: [parameter.fqn for parameter in unit.parameters]
        for unit in leaves.model.units if unit.fqn.startswith("blocks.")
    }
    numels = {parameter.fqn: parameter.numel for parameter in leaves.model.parameters}
    steady = plan(leaves, device="cpu").of_rank(0).steady
    sizes = [4 * sum(map(numels.__getitem__, names)) for names in blocks.values()]
    gathered = [op.nbytes for op in steady if op.kind == "all_gather"]
    assert gathered[2:5] == sizes  # behind both tables
    reduced = [op.nbytes // 4 for op in steady if op.kind == "reduce_scatter"]
    last = [numels[fqn] for fqn in blocks["blocks.2"]]
    start = reduced.index(last[0])
    assert any(reduced[i : i + len(last)] == last for i in range(start, len(reduced)))
    singly = plan(scenario(strategy=strategy), device="cpu").of_rank(0).steady
    assert len(gathered) < sum(op.kind == "all_gather" for op in singly) // 3


VOCABULARY_OF_100 = GPT | {"sizes": GPT["sizes"] | {"vocabulary": 100}}


def test_a_mean_size_that_takes_each_block_makes_leaves_whose_parameters_share_an_element() -> None:
    """A block of GPT has 872 elements in eight modules that own some, and three around them: 79 on
    average. Its attention has 57, its MLP 184, and the whole model with its embeddings 112."""
    by_size = "stage3_module_granularity_threshold"
    leaves, fine, none = (
        plan(sharded(
            model=VOCABULARY_OF_100, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0,
            **options,
        ), device="cpu")
        for options in ({"leaf_module": "blocks"}, {by_size: 79}, {by_size: 56})
    )
    taken = {most: granular(by_block(sharded(model=VOCABULARY_OF_100).model), most)
             for most in (56, 57, 78, 79, 111, 112)}
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    attention = tuple(f"{block}.attn" for block in blocks)
    assert list(taken.values()) == [(), attention, attention, blocks, blocks, ("root",)]
    sent = [[op.nbytes for op in each.of_rank(0).steady if op.kind == "all_gather"]
            for each in (leaves, fine, none)]
    assert sent[0] == sent[1]
    assert len(sent[2]) > len(sent[0])
    shared = replay(fine.of_rank(0))["steady"].end_bytes - (
        replay(leaves.of_rank(0))["steady"].end_bytes
    )
    assert shared == 4 * 3
    assert program_laws.breaches(fine) == ()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"strategy": {"zero_hpz_partition_size": 3}}, "expected a divisor of 2 ranks, found 3"),
        ({"strategy": {"mics_shard_size": 2}}, "ended with 0.19.7; hsdp shards over a part"),
        ({"strategy": {"stage3_max_live_params": 3}}, "named stage3_max_live_parameters in 0.19"),
        ({"strategy": {"stage3_module_granularity_threshold": 60}},
         "expected one that takes each block or none, found 60, which takes blocks.0.attn; "
         'leaf_module = "blocks" takes each'),
        ({"strategy": {"stage3_module_granularity_threshold": 10**6}}, "which takes root"),
        ({"strategy": {"leaf_module": "blocks", "zero_hpz_partition_size": 2}},
         "strategy.zero_hpz_partition_size: expected 1 with leaf modules, found 2"),
        ({"strategy": {"leaf_module": "blocks"}, "frozen": ["wte.*", "wpe.*"]},
         'strategy.leaf_module: expected none, as the input of blocks.0 needs no gradient'),
        ({"strategy": {"reduce_scatter": False}}, "strategy.reduce_scatter: expected true"),
        *[({"strategy": {"trace": "breaks"}, **blocks}, 'strategy.trace: expected "holds", found')
          for blocks in ({"model": MLP, "batch": {"sequence_length": 1}},
                         {"model": GPT | {"sizes": GPT["sizes"] | {"num_layers": 1}}},
                         {"frozen": ["blocks.0.*"]},
                         {"activation_checkpointing": {"mode": "full", "every": 2}})],
        ({"strategy": {"trace": "breaks", "stage3_module_granularity_threshold": 99}},
         'granularity_threshold: expected 0 with trace = "breaks", found 99'),
        ({"ranks": 1}, "strategy.dp_shard: expected at least 2 ranks with deepspeed3"),
        ({"precision": {"autocast": "bf16"}},
         "precision.autocast: expected none with DeepSpeed's engine"),
        ({"activation_checkpointing": {"mode": "full", "early_stop": False}},
         "activation_checkpointing.early_stop: expected another with deepspeed3"),
        ({"model": GPT | {"uses": 2}}, "model.uses: expected 1 with deepspeed3"),
        ({"wrapping": {"every": 2}}, "wrapping: expected none with deepspeed3"),
    ],
)
def test_what_stage_3_has_not_is_refused_by_name(changed: dict[str, Any], told: str) -> None:
    strategy = {"name": "deepspeed3"} | changed.pop("strategy", {})
    with pytest.raises(ScenarioError) as error:
        scenario(strategy=strategy, **changed)
    assert told in str(error.value)


@pytest.mark.parametrize(("name", "changed", "dropouts"), [
    ("gpt2", {"embd_pdrop": 0.0}, 1 + 2 * 2), ("gpt2-without-dropout", {}, 1 + 2 * 2),
    ("phi3", {}, 2 * 2), ("llama", {}, 0),
])
def test_dropouts_of_0_are_modules_of_transformers_and_count_in_the_trace(
    name: str, changed: dict[str, float], dropouts: int, tmp_path: Path
) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    case = scenario(
        strategy={"name": "deepspeed3"}, model={"huggingface": str(tmp_path / "config.json")}
    )
    modules = training(case, device="cpu").model.modules
    names = [op.name for each in modules for op in each.operators[:1] if op.kind == "dropout"]
    assert len(names) == len(set(names)) == dropouts


@given(ranks=st.integers(2, 70), vocabulary=st.integers(5, 90))
def test_stage_3_has_no_more_kinds_of_ranks_than_its_work_is_told_to_have(
    ranks: int, vocabulary: int
) -> None:
    case = scenario(
        ranks=ranks, strategy={"name": "deepspeed3"},
        model=GPT | {"sizes": GPT["sizes"] | {"vocabulary": vocabulary}},
        precision={"parameters": "bf16", "reduce": "fp32"},
    )
    assert len(plan(case, device="cpu").ranks) <= case.work.kinds <= ranks


def test_a_thousand_ranks_of_even_shards_are_of_one_kind() -> None:
    case = scenario(
        strategy={"name": "deepspeed3"}, model={"preset": "gpt-3-175b"},
        precision={"parameters": "fp16"}, cluster={"preset": "dgx-a100", "nodes": 128},
    )
    assert case.work.kinds == 1
