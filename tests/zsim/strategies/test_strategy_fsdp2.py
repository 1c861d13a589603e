"""fsdp2 and hsdp as Programs: who is gathered when, what waits for what, and that nothing outlives
its use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.programs.small_programs import small_model
from zsim.autograd.lowering.lower_model import lower
from zsim.ir.laws import program_laws
from zsim.ir.laws.validate import validate
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Alloc, Op
from zsim.ir.program import Program
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Optimizer, Precision
from zsim.scenario import plan as planning
from zsim.scenario.scenario import parse
from zsim.strategies import fsdp2, hsdp, problems
from zsim.strategies.building.training import Training

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
FORWARD_GATHERS = [("all_gather", unit) for unit in ["root", *BLOCKS]]
BACKWARD = [
    ("all_gather", "blocks.2"), ("all_gather", "blocks.1"), ("reduce_scatter", "blocks.2"),
    ("all_gather", "blocks.0"), ("reduce_scatter", "blocks.1"), ("reduce_scatter", "blocks.0"),
    ("reduce_scatter", "root"),
]


def training(
    model: ModelSpec | None = None, *, precision: Precision | None = None, accumulation: int = 1
) -> Training:
    """The three-block model, or `model`, for one micro-batch of 64 tokens."""
    model, precision = model or small_model(), precision or Precision()
    batch = Batch(micro_batch=1, sequence_length=64, accumulation=accumulation)
    lowered = lower(model, batch=batch, dtype=precision.parameters)
    return Training(model=model, modules=lowered, batch=batch, precision=precision)


def plan(
    case: Training | None = None, *, ranks: int = 2, replicas: int = 1,
    keep: str | bool | int = "auto",
) -> Program:
    """The Program on `replicas` × `ranks` ranks."""
    options = hsdp.Options(reshard_after_forward=keep)  # type: ignore[arg-type]
    return hsdp.plan(
        case or training(), mesh=Mesh(dp_replicate=replicas, dp_shard=ranks), options=options
    )


def steady(program: Program) -> tuple[Op, ...]:
    """The steady step of rank 0."""
    return program.of_rank(0).steady


def collectives(program: Program) -> list[tuple[str, str]]:
    """(op, unit) of each collective of the steady step."""
    return [(op.kind, op.unit) for op in steady(program) if op.kind in COLLECTIVES]


def only(ops: tuple[Op, ...], kind: str, unit: str, stream: str, *, nth: int = 0) -> Op:
    """The `nth` op of that kind, unit and stream."""
    return [op for op in ops if (op.kind, op.unit, op.stream) == (kind, unit, stream)][nth]


def reaches(ops: tuple[Op, ...], later: Op, earlier: Op) -> bool:
    """True if `later` cannot start before `earlier` ends, by waits and the order within streams."""
    pending, seen = [later.index], set()
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        before = [op.index for op in ops[:index] if op.stream == ops[index].stream != "host"][-1:]
        pending += [*ops[index].waits, *before]
    return earlier.index in seen and later.index != earlier.index


def test_with_auto_the_root_stays_whole_and_every_block_is_gathered_twice() -> None:
    assert collectives(plan()) == FORWARD_GATHERS + BACKWARD


def test_with_true_the_root_is_gathered_again_before_it_prefetches_the_last_block() -> None:
    assert collectives(plan(keep=True)) == [*FORWARD_GATHERS, ("all_gather", "root"), *BACKWARD]


def test_with_false_nothing_is_gathered_in_backward() -> None:
    reduced = [pair for pair in BACKWARD if pair[0] == "reduce_scatter"]

    assert collectives(plan(keep=False)) == FORWARD_GATHERS + reduced


def test_with_a_number_backward_gathers_over_that_many_ranks_and_keeps_a_part_of_each() -> None:
    ops = steady(plan(ranks=4, keep=2))
    gathers = [(op.unit, op.group) for op in ops if op.kind == "all_gather"]
    kept = {
        event.buffer for op in ops for event in op.memory
        if isinstance(event, Alloc) and "resharded" in event.buffer
    }

    assert gathers == [
        *[(unit, "dp_shard") for unit in ["root", *BLOCKS]],
        *[(unit, "dp_shard:2") for unit in ["root", *reversed(BLOCKS)]],
    ]
    assert kept == {f"{parameter.fqn}.resharded" for parameter in small_model().parameters}


@pytest.mark.parametrize(("number", "same"), [(1, False), (4, True)])
def test_one_rank_means_false_and_all_ranks_mean_true(number: int, same: bool) -> None:
    assert plan(ranks=4, keep=number) == plan(ranks=4, keep=same)


def test_a_number_that_divides_nothing_is_refused() -> None:
    options = fsdp2.Options(reshard_after_forward=3)
    (refusal,) = problems("fsdp2", options, mesh=Mesh(dp_shard=4), optimizer=Optimizer())
    assert refusal.startswith(
        "strategy.reshard_after_forward: expected a divisor of dp_shard = 4, found 3"
    )


def test_groups_whose_input_needs_no_gradient_reduce_last_and_the_root_first_of_them() -> None:
    case = training()
    first, *rest = case.modules
    block = next(module for module in rest if module.unit == "blocks.0")
    blind = replace(
        case, modules=tuple(replace(m, input_needs_gradient=m is not block) for m in case.modules)
    )
    reduced = [unit for kind, unit in collectives(plan(blind)) if kind == "reduce_scatter"]

    assert first.unit == "root"
    assert reduced == ["blocks.2", "blocks.1", "root", "blocks.0"]


def test_hsdp_all_reduces_each_shard_over_the_replicas_as_soon_as_it_is_reduced() -> None:
    ops = [
        (op.kind, op.unit, op.group) for op in steady(plan(replicas=2))
        if op.kind in ("reduce_scatter", "all_reduce")
    ]

    assert ops == [
        pair for unit in ["blocks.2", "blocks.1", "blocks.0", "root"]
        for pair in (("reduce_scatter", unit, "dp_shard"), ("all_reduce", unit, "dp_replicate"))
    ]


def test_in_forward_an_all_gather_waits_for_the_copy_out_before_the_last_so_two_run_ahead() -> None:
    ops = steady(plan())
    gather = only(ops, "copy", "blocks.1", "all_gather_copy_in")

    assert gather.waits == (only(ops, "copy", "root", "compute").index,)
    assert not reaches(ops, gather, only(ops, "copy", "blocks.0", "compute"))


def test_in_backward_the_prefetched_all_gather_waits_for_the_running_groups_copy_out() -> None:
    ops = steady(plan())
    gather = only(ops, "copy", "blocks.0", "all_gather_copy_in", nth=1)

    assert gather.waits == (only(ops, "copy", "blocks.1", "compute", nth=1).index,)
    assert not reaches(ops, gather, only(ops, "backward", "blocks.1", "compute"))


def test_a_group_copies_its_gradients_in_only_when_the_one_before_has_been_reduced() -> None:
    ops = steady(plan())
    scatter = only(ops, "reduce_scatter", "blocks.1", "reduce_scatter")
    (copy_in,) = scatter.waits

    assert ops[copy_in].waits == (only(ops, "reduce_scatter", "blocks.2", "reduce_scatter").index,)


def test_the_first_all_gather_of_a_later_micro_batch_waits_for_the_compute_stream() -> None:
    ops = steady(plan(training(accumulation=2)))
    gather = only(ops, "copy", "root", "all_gather_copy_in", nth=1)
    last_reduction = only(ops, "reduce_scatter", "root", "reduce_scatter")

    assert reaches(ops, gather, last_reduction)


def test_a_group_kept_in_parts_is_gathered_again_only_after_its_parts_were_copied() -> None:
    ops = steady(plan(ranks=4, keep=2))
    gather = only(ops, "copy", "root", "all_gather_copy_in", nth=1)
    kept = only(ops, "copy", "root", "compute", nth=1)

    assert kept.index in gather.waits


def test_in_the_final_callback_the_next_group_waits_for_the_all_reduce_of_the_root() -> None:
    case = training()
    blind = replace(
        case,
        modules=tuple(replace(m, input_needs_gradient=m.unit != "blocks.0") for m in case.modules),
    )
    ops = steady(plan(blind, replicas=2))
    (copy_in,) = only(ops, "reduce_scatter", "blocks.0", "reduce_scatter").waits

    assert reaches(ops, ops[copy_in], only(ops, "all_reduce", "root", "all_reduce"))


def test_gathered_bytes_are_padded_dim_by_dim_and_in_the_compute_dtype() -> None:
    case = training(precision=Precision(parameters="bfloat16", reduce="float32"))
    sizes = {op.unit: op.nbytes for op in steady(plan(case, ranks=3)) if op.kind == "all_gather"}

    assert sizes == {
        unit.fqn: 2
        * sum(-(-p.shape[0] // 3) * 3 * (p.numel // p.shape[0]) for p in unit.parameters)
        for unit in small_model().units
    }


def test_ranks_with_equal_shards_share_a_program_and_replicas_share_all() -> None:
    even, uneven = plan(ranks=4, replicas=2), plan(ranks=5)

    assert (len(even.ranks), even.assignment) == (1, (0,) * 8)
    assert len(uneven.ranks) > 1
    assert uneven.of_rank(0) != uneven.of_rank(4)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 9), replicas=st.integers(1, 2),
    keep=st.sampled_from(["auto", True, False]),
    reduce=st.sampled_from(
        [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
    ),
    accumulation=st.integers(1, 3), sync=st.sampled_from(["every", "last"]),
)
def test_any_step_is_valid_and_obeys_the_laws(
    ranks: int, replicas: int, keep: str | bool, reduce: tuple[str, str], accumulation: int,
    sync: str,
) -> None:
    precision = Precision(parameters=reduce[0], reduce=reduce[1])  # type: ignore[arg-type]
    case = replace(training(precision=precision, accumulation=accumulation), sync=sync)
    program = plan(case, ranks=ranks, replicas=replicas, keep=keep)
    assert program_laws.breaches(validate(program)) == ()


@given(rows=st.lists(st.integers(1, 12), min_size=2, max_size=4), ranks=st.integers(1, 8))
def test_every_rank_steps_the_rows_that_torch_chunk_gives_it(rows, ranks):
    """Full ranks, for each number of rows a last partial one, and empty ones: AdamW's states say
    which rows a rank has."""
    text = f"""
model = {{ family = "mlp", sizes = {{ dims = {rows}, hidden = 5, num_classes = 3 }} }}
batch = {{ micro_batch = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = "fsdp2" }}
"""
    scenario = parse(text.encode(), where="rows.toml")
    program = planning.plan(scenario, device="cpu")
    for rank in range(ranks):
        states = 0
        for parameter in scenario.model.parameters:
            per_rank = -(-parameter.shape[0] // ranks)
            own = max(0, min(per_rank, parameter.shape[0] - rank * per_rank)) * (
                parameter.numel // parameter.shape[0]
            )
            # two float32 moments, and a step counter even where nothing is stepped
            states += 8 * own + 4
        assert replay(program.of_rank(rank))["steady"].held["optimizer_states"] == states


UNEVEN = """
model = { family = "mlp", sizes = { dims = [3, 5, 4], hidden = 2, num_classes = 3 } }
batch = { micro_batch = 2, accumulation = 2 }
cluster = { preset = "cpu-gloo", ranks = 4 }
"""


def uneven(more: str) -> tuple[Op, ...]:
    return steady(planning.plan(parse((UNEVEN + more).encode(), where="x.toml"), device="cpu"))


def test_the_input_of_an_all_gather_is_cast_with_its_padding():
    """The head's 3 rows of 4 and its bias of 3 are a row and an element on each of four ranks."""
    ops = uneven('strategy = { name = "fsdp2" }\nprecision = { parameters = "bf16" }')
    casts = {
        event.buffer: event.nbytes for op in ops for event in op.memory
        if isinstance(event, Alloc) and event.buffer.endswith(".cast")
    }
    assert casts["root.cast"] == 2 * (4 + 1)


def test_a_frozen_first_unit_is_let_go_at_the_end_of_each_backward():
    """The root's callback ends it in every micro-batch, as its own backward never runs."""
    ops = uneven(
        'strategy = { name = "fsdp2", reshard_after_forward = false }\nfrozen = ["blocks.0.*"]'
    )
    gathered = [op.micro_batch for op in ops if (op.kind, op.unit) == ("all_gather", "blocks.0")]
    assert gathered == [0, 1]


def test_replicas_all_reduce_the_shard_that_the_reduce_scatter_left() -> None:
    """The head's 3 rows of 4 elements and its bias of 3 are padded to 4 rows and 4 elements."""
    ops = uneven('strategy = { name = "hsdp", dp_replicate = 2, dp_shard = 2 }')
    sent = {op.kind: op.nbytes for op in ops if op.unit == "root" and op.kind in COLLECTIVES}
    assert sent == {"all_gather": 4 * 20, "reduce_scatter": 4 * 20, "all_reduce": 4 * 10}
