"""Laws of every Program of ddp, zero1, zero2, zero3 and zero_redundancy, and a few Programs
written out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.autograd.lowering.lower_model import lower
from zsim.ir.laws import program_laws
from zsim.ir.laws.validate import validate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Alloc
from zsim.ir.program import Program
from zsim.models.families import load_preset
from zsim.models.training_options import DTYPE_NBYTES, Batch, Dtype, Optimizer, Precision
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse
from zsim.strategies import ddp, zero1, zero2, zero3, zero_redundancy
from zsim.strategies.building.training import Training
from zsim.strategies.flat_buffer.groups import FlatGroup, Grouping, flat_groups
from zsim.strategies.replicated import buckets as replicated_model

MODELS = ("mlp-tiny", "mlp-uneven", "gpt-tiny")
ALL = ("ddp", "zero1/all_reduce", "zero1/reduce_scatter", "zero2", "zero3", "zero_redundancy")


def training(
    model: str = "mlp-tiny", *, parameters: Dtype = "float32", reduce: Dtype = "float32",
    accumulation: int = 1, sync: str = "every", optimizer: Optimizer | None = None,
) -> Training:
    """A small Training on a CPU."""
    batch = Batch(
        micro_batch=2, sequence_length=1 if "mlp" in model else 16, accumulation=accumulation
    )
    spec = load_preset(model, sequence_length=batch.sequence_length)
    return Training(
        model=spec, modules=lower(spec, batch=batch, dtype=parameters), batch=batch,
        precision=Precision(parameters=parameters, reduce=reduce),
        optimizer=optimizer or Optimizer(), sync="last" if sync == "last" else "every",
        device="cpu",
    )


def program(
    name: str, case: Training, *, ranks: int, lookahead: int = 1, granularity: str | int = "unit"
) -> Program:
    """The Program of one of `ALL` on `ranks` ranks."""
    replicas, shards = Mesh(dp_replicate=ranks), Mesh(dp_shard=ranks)
    cut = (
        "parameter"
        if granularity == "parameter"
        else "unit"
        if granularity == "unit"
        else int(granularity)
    )
    match name:
        case "ddp":
            return ddp.plan(case, mesh=replicas, options=ddp.Options())
        case "zero_redundancy":
            return zero_redundancy.plan(case, mesh=replicas, options=ddp.Options())
        case "zero1/all_reduce":
            return zero1.plan(
                case, mesh=shards, options=zero1.Options(form="all_reduce", granularity=cut)
            )
        case "zero1/reduce_scatter":
            return zero1.plan(case, mesh=shards, options=zero1.Options(granularity=cut))
        case "zero2":
            return zero2.plan(case, mesh=shards, options=zero2.Options(granularity=cut))
        case _:
            return zero3.plan(
                case, mesh=shards, options=zero3.Options(lookahead=lookahead, granularity=cut)
            )


def live_after(case: Program, *, rank: int, steps: int) -> dict[str, Alloc]:
    """The buffers that live after construction and `steps` steps; a buffer made twice or freed
    unmade fails."""
    ops = case.of_rank(rank)
    live: dict[str, Alloc] = {}
    for op in (*ops.construction, *(ops.first if steps else ()), *(ops.steady * max(0, steps - 1))):
        for event in op.memory:
            if isinstance(event, Alloc):
                assert event.buffer not in live
                live[event.buffer] = event
            else:
                del live[event.buffer]
    return live


def collectives(case: Program, *, rank: int = 0) -> list[tuple[str, str, int]]:
    """(kind, unit, bytes) of the steady step."""
    return [
        (op.kind, op.unit, op.nbytes) for op in case.of_rank(rank).steady if op.kind in COLLECTIVES
    ]


def payload(case: Program) -> Counter[str]:
    """Bytes of the steady step by kind of collective."""
    total: Counter[str] = Counter()
    for kind, _, nbytes in collectives(case):
        total[kind] += nbytes
    return total


cases = st.builds(
    training, st.sampled_from(MODELS), parameters=st.sampled_from(["float32", "bfloat16"]),
    reduce=st.sampled_from(["float32", "bfloat16"]), accumulation=st.integers(1, 3),
    sync=st.sampled_from(["every", "last"]),
)
granularities = st.sampled_from(["unit", "parameter", 1, 3000, 20_000, 10**9])


@given(st.sampled_from(ALL), cases, st.integers(1, 5), st.integers(0, 3), granularities)
def test_every_program_is_valid_and_obeys_the_laws(
    name: str, case: Training, ranks: int, lookahead: int, granularity: str | int
) -> None:
    plan = program(name, case, ranks=ranks, lookahead=lookahead, granularity=granularity)
    assert program_laws.breaches(validate(plan)) == ()


def _groups(case: Training, granularity: str | int, ranks: int) -> tuple[FlatGroup, ...]:
    cut = (
        "parameter"
        if granularity == "parameter"
        else "unit"
        if granularity == "unit"
        else int(granularity)
    )
    return flat_groups(
        case.model, grouping=Grouping(granularity=cut), num_shards=ranks,
        dtype=case.precision.parameters,
    )


@given(st.sampled_from(["unit", "parameter"]), st.integers(2, 5), st.integers(0, 3))
def test_lookahead_changes_neither_what_is_gathered_nor_how_often(
    granularity: str, ranks: int, lookahead: int
) -> None:
    case = training("gpt-tiny")
    ahead = program("zero3", case, ranks=ranks, lookahead=lookahead, granularity=granularity)
    plain = program("zero3", case, ranks=ranks, lookahead=0, granularity=granularity)

    assert Counter(collectives(ahead)) == Counter(collectives(plain))


def test_the_forms_move_what_the_papers_say() -> None:
    case = training()  # every parameter count of it divides by 2, so nothing is padded
    psi = case.model.num_parameters * 4

    assert {name: payload(program(name, case, ranks=2)) for name in ALL} == {
        "ddp": {"all_reduce": psi}, "zero1/all_reduce": {"all_reduce": psi, "all_gather": psi},
        "zero1/reduce_scatter": {"reduce_scatter": psi, "all_gather": psi},
        "zero2": {"reduce_scatter": psi, "all_gather": psi},
        "zero3": {"reduce_scatter": psi, "all_gather": 2 * psi},
        "zero_redundancy": {"all_reduce": psi, "broadcast": psi},
    }


def test_zero3_reads_as_its_algorithm() -> None:
    ops = program("zero3", training(), ranks=2, lookahead=1).of_rank(0).steady

    assert [f"{op.kind} {op.unit}" for op in ops if op.kind not in ("free", "optimizer")] == [
        "all_gather blocks.0", "all_gather blocks.1", "forward blocks.0", "all_gather blocks.2",
        "forward blocks.1", "all_gather root", "forward blocks.2", "forward root",
        "all_gather root", "all_gather blocks.2", "backward root", "reduce_scatter root",
        "all_gather blocks.1", "backward blocks.2", "reduce_scatter blocks.2",
        "all_gather blocks.0", "backward blocks.1", "reduce_scatter blocks.1", "backward blocks.0",
        "reduce_scatter blocks.0",
    ]


def test_an_all_gather_waits_for_the_compute_whose_memory_it_takes() -> None:
    ops = program("zero3", training(), ranks=2, lookahead=0).of_rank(0).steady
    waited = {
        op.unit: [ops[wait].unit for wait in op.waits] for op in ops[:9] if op.kind == "all_gather"
    }

    assert waited == {"blocks.0": [], "blocks.1": ["blocks.0"], "blocks.2": ["blocks.1"]}


def test_tied_weights_are_gathered_once_a_pass_and_reduced_at_the_end_of_backward() -> None:
    plan = program("zero3", training("gpt-tiny"), ranks=2)
    root = [kind for kind, unit, _ in collectives(plan) if unit == "root"]

    assert root == ["all_gather", "all_gather", "reduce_scatter"]
    assert collectives(plan)[-1][:2] == ("reduce_scatter", "root")


@pytest.mark.parametrize(("sync", "reductions"), [("every", 3), ("last", 1)])
@pytest.mark.parametrize(
    "name", ["ddp", "zero1/all_reduce", "zero1/reduce_scatter", "zero2", "zero3"]
)
def test_sync_says_how_often_gradients_are_reduced(name: str, sync: str, reductions: int) -> None:
    case = training(accumulation=3, sync=sync)
    moved = payload(program(name, case, ranks=2))

    assert (
        moved["all_reduce"] + moved["reduce_scatter"] == reductions * case.model.num_parameters * 4
    )


def test_ddp_reduces_one_bucket_first_and_rebuilt_buckets_afterwards() -> None:
    case = training()
    plan = ddp.plan(case, mesh=Mesh(dp_replicate=2), options=ddp.Options(bucket_cap_mb=0.02))
    first = [(op.unit, op.nbytes) for op in plan.of_rank(0).first if op.kind == "all_reduce"]

    assert first == [("bucket.0", 101_544)]
    assert collectives(plan) == [
        ("all_reduce", "bucket.0", 34_728), ("all_reduce", "bucket.1", 33_408),
        ("all_reduce", "bucket.2", 33_408),
    ]


def test_ddp_rebuilds_its_buckets_in_the_first_step_when_it_synchronises_twice() -> None:
    case = training(accumulation=2)
    plan = ddp.plan(case, mesh=Mesh(dp_replicate=2), options=ddp.Options(bucket_cap_mb=0.02))

    assert [
        (op.kind, op.unit, op.nbytes) for op in plan.of_rank(0).first if op.kind in COLLECTIVES
    ] == [
        ("all_reduce", "bucket.0", 101_544), ("broadcast", "bucket_order", 60),
        ("broadcast", "bucket_sizes", 12), ("all_reduce", "bucket.0", 34_728),
        ("all_reduce", "bucket.1", 33_408), ("all_reduce", "bucket.2", 33_408),
    ]


@given(st.sampled_from(MODELS), st.floats(1e-4, 1.0))
def test_buckets_hold_every_parameter_once_in_the_order_of_ready_gradients(
    model: str, cap: float
) -> None:
    case = training(model)
    buckets = ddp.buckets(case, ddp.Options(bucket_cap_mb=cap))

    assert tuple(
        parameter for bucket in buckets for parameter in bucket
    ) == replicated_model.ready_order(case)
    assert sorted(p.fqn for p in replicated_model.ready_order(case)) == sorted(
        p.fqn for p in case.model.parameters
    )


@pytest.mark.parametrize(("model", "number"), [("gpt-small", 2), ("gpt-2-124m", 13)])
def test_without_a_cap_the_first_bucket_is_small(model: str, number: int) -> None:
    """A bucket closes with the parameter by which it reaches 1 MiB, and 25 MiB after the first."""
    case = training(model)
    *closed, rest = (
        [p.numel * 4 for p in bucket] for bucket in ddp.buckets(case, ddp.Options())
    )
    caps = [ddp.MIB] + [25 * ddp.MIB] * (len(closed) - 1)

    assert len(closed) == number - 1
    assert all(sum(b[:-1]) < cap <= sum(b) for b, cap in zip(closed, caps, strict=True))
    assert sum(map(sum, closed)) + sum(rest) == case.model.num_parameters * 4


@given(st.sampled_from(MODELS), st.integers(1, 7))
def test_zero_redundancy_gives_every_parameter_one_owner_who_broadcasts_it(
    model: str, ranks: int
) -> None:
    case = training(model)
    owned = zero_redundancy.owned_parameters(case, num_ranks=ranks)
    plan = zero_redundancy.plan(case, mesh=Mesh(dp_replicate=ranks), options=ddp.Options())
    sent = [(op.root, op.unit) for op in plan.of_rank(0).steady if op.kind == "broadcast"]

    assert sorted(p.fqn for mine in owned for p in mine) == sorted(
        p.fqn for p in case.model.parameters
    )
    assert sent == (
        [(root, p.fqn) for root, mine in enumerate(owned) for p in mine] if ranks > 1 else []
    )


@given(st.sampled_from(["zero1/all_reduce", "zero2", "zero3"]), st.integers(2, 6), granularities)
def test_optimizer_states_are_a_shard_of_every_group(
    name: str, ranks: int, granularity: str | int
) -> None:
    case = training(parameters="bfloat16", reduce="bfloat16")
    live = live_after(
        program(name, case, ranks=ranks, granularity=granularity), rank=0, steps=1
    ).values()
    shards = [group.layout.shard_numel for group in _groups(case, granularity, ranks)]
    master_and_moments, step_counter = 3 * DTYPE_NBYTES["float32"], 4

    assert sum(a.nbytes for a in live if a.kind == "optimizer_states") == (
        master_and_moments * sum(shards) + step_counter * len(shards)
    )


@pytest.mark.parametrize("form", ["all_reduce", "reduce_scatter"])
def test_zero1_adds_only_to_gradients_whose_reduction_has_ended(form):
    """A second micro-batch would otherwise add in place to gradients that are still reduced."""
    rank_program = (
        program(f"zero1/{form}", training("gpt-tiny", accumulation=2), ranks=2).of_rank(0).steady
    )
    reduced = {
        op.unit: op.index for op in rank_program
        if op.kind == "copy" and op.stream == form and op.micro_batch == 0
    }
    assert len(reduced) > 2
    assert all(rank_program[index - 1].kind == form for index in reduced.values())

    for op in (op for op in rank_program if op.kind == "backward" and op.micro_batch == 1):
        assert reduced[op.unit] in op.waits


def test_a_bucket_closes_once_it_has_reached_its_cap_exactly():
    case = training("mlp-tiny")
    first, second, *_ = replicated_model.ready_order(case)
    cap = 4 * (first.numel + second.numel) / ddp.MIB
    assert ddp.buckets(case, ddp.Options(bucket_cap_mb=cap))[0] == (first, second)


def test_construction_of_ddp_broadcasts_parameters_in_pieces_of_at_least_250_mib():
    """torch coalesces until the cap is reached: _verify and sync of module states,
    torch/csrc/distributed/c10d/reducer.cpp."""
    text = """
model = { preset = "gpt-2-124m" }
batch = { micro_batch = 1, sequence_length = 8 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "ddp" }
"""
    case = parse(text.encode(), where="pieces.toml")
    sizes = [
        op.nbytes for op in plan(case, device="cpu").ranks[0].construction
        if (op.kind, op.unit) == ("broadcast", "parameters")
    ]
    assert sum(sizes) == 4 * case.model.num_parameters
    assert len(sizes) > 1
    assert all(size >= 250 * 2**20 for size in sizes[:-1])


def test_ddp_tells_which_parameters_were_used_by_an_int32_each():
    text = """
model = { family = "mlp", sizes = { dims = [3, 5], hidden = 2, num_classes = 3 } }
batch = { micro_batch = 2 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "ddp", find_unused_parameters = true }
"""
    case = parse(text.encode(), where="used.toml")
    (used,) = {
        event.nbytes for op in plan(case, device="cpu").ranks[0].construction
        for event in op.memory if isinstance(event, Alloc) and event.buffer.startswith("used")
    }
    assert used == 4 * len(case.model.parameters)
