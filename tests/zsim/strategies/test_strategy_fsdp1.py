"""fsdp1 as a Program: what is cut how, what is gathered how often, what the host waits for, and
what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.programs.small_programs import small_model, small_training
from zsim.errors import ScenarioError
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Alloc, Op
from zsim.ir.program import Program, RankProgram
from zsim.models.training_options import Device
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan as plan_scenario
from zsim.scenario.scenario import parse
from zsim.strategies import fsdp1
from zsim.strategies.building.training import Training
from zsim.strategies.flat_parameter.flat_parameter import flat_parameters, stepped
from zsim.strategies.flat_parameter.hooks import Order
from zsim.strategies.fsdp.gradient_division import division

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def plan(
    case: Training | None = None, *, ranks: int = 2, replicas: int = 1, **options: object
) -> Program:
    """The Program of three blocks on `replicas` × `ranks` ranks."""
    return fsdp1.plan(
        case or small_training(),
        mesh=Mesh(dp_replicate=replicas, dp_shard=ranks),
        options=fsdp1.Options(**options),  # type: ignore[arg-type]
    )


def steady(program: Program) -> tuple[Op, ...]:
    """The steady step of rank 0."""
    return program.of_rank(0).steady


def collectives(program: Program) -> list[tuple[str, str]]:
    """(op, unit) of each collective of the steady step."""
    return [(op.kind, op.unit) for op in steady(program) if op.kind in COLLECTIVES]


def test_the_root_is_gathered_once_and_every_block_twice() -> None:
    assert collectives(plan()) == [
        *[("all_gather", unit) for unit in ["root", *BLOCKS, "blocks.2", "blocks.1"]],
        ("reduce_scatter", "blocks.2"), ("all_gather", "blocks.0"),
        *[("reduce_scatter", unit) for unit in ["blocks.1", "blocks.0", "root"]],
    ]


def test_with_grad_op_every_unit_is_gathered_once_and_kept() -> None:
    gathered = [
        unit for kind, unit in collectives(plan(sharding="grad_op")) if kind == "all_gather"
    ]

    assert gathered == ["root", *BLOCKS]


def test_over_replicas_each_shard_is_all_reduced_after_its_reduce_scatter() -> None:
    ops = [
        (op.kind, op.unit, op.group) for op in steady(plan(replicas=2))
        if op.kind in ("reduce_scatter", "all_reduce")
    ]

    assert ops == [
        pair for unit in ["blocks.2", "blocks.1", "blocks.0", "root"]
        for pair in (("reduce_scatter", unit, "dp_shard"), ("all_reduce", unit, "dp_replicate"))
    ]


def test_replicas_all_reduce_a_shard_and_not_the_whole() -> None:
    ops = [op for op in steady(plan(ranks=4, replicas=2)) if op.kind in COLLECTIVES]
    scattered = {op.unit: op.nbytes for op in ops if op.kind == "reduce_scatter"}
    shared = {op.unit: op.nbytes for op in ops if op.kind == "all_reduce"}

    assert shared == {unit: nbytes // 4 for unit, nbytes in scattered.items()}


def test_the_host_waits_only_with_the_limiter_and_for_frees_on_the_compute_stream() -> None:
    ops = steady(plan())
    waits = [ops[wait] for op in ops if op.kind == "host_wait" for wait in op.waits]

    assert waits
    assert {(op.kind, op.stream) for op in waits} == {("free", "compute")}
    assert [op for op in steady(plan(limit_all_gathers=False)) if op.kind == "host_wait"] == []


def test_the_first_step_prefetches_nothing_in_forward_and_later_ones_reduce_a_block_later() -> None:
    program = plan(forward_prefetch=True)
    first = [(op.kind, op.unit) for op in program.of_rank(0).first if op.kind in COLLECTIVES]

    assert first == collectives(plan())
    assert collectives(program)[4:] == [
        *[("all_gather", unit) for unit in ["blocks.2", "blocks.1", "blocks.0"]],
        *[("reduce_scatter", unit) for unit in ["blocks.2", "blocks.1", "blocks.0", "root"]],
    ]


@pytest.mark.parametrize(("ranks", "expected"), [
    (2, (2.0, 1.0)), (3, (2.0, 1.5)), (4, (2.0, 2.0)), (8, (4.0, 2.0)), (12, (4.0, 3.0)),
    (64, (8.0, 8.0)),
])
def test_gradients_are_divided_by_the_world_in_two_steps(
    ranks: int, expected: tuple[float, float]
) -> None:
    assert division(ranks) == expected


def test_kernels_copy_gradients_together_cast_divide_and_step_them() -> None:
    """Every byte that gradient and shard of one block move: n elements on four ranks, in bf16,
    reduced in bf16."""
    ops = [op for op in steady(plan(ranks=4)) if op.unit == "blocks.1" and op.kind == "copy"]
    n = next(unit.numel for unit in small_model().units if unit.fqn == "blocks.1")

    assert n % 4 == 0
    assert [
        (op.stream, [(kernel.operator, kernel.nbytes) for kernel in op.kernels]) for op in ops
    ] == [
        ("all_gather_copy_in", [("copy", n // 4 * (4 + 2))]),
        ("all_gather_copy_in", [("copy", n // 4 * (4 + 2))]), ("compute", [("copy", n * (2 + 2))]),
        ("reduce_scatter", [("divide", n * (2 + 2))]),
        ("reduce_scatter", [("divide", n // 4 * (2 + 2)), ("copy", n // 4 * (2 + 4))]),
    ]


@pytest.mark.parametrize("original", [False, True])
def test_every_element_is_stepped_by_one_rank(original: bool) -> None:
    model = small_model()
    flats = flat_parameters(model, num_shards=5, dtype="bfloat16", aligned=original)
    total = sum(sum(stepped(model, flats, rank=rank, original=original)) for rank in range(5))

    assert total == (
        model.num_parameters if original else sum(flat.padded for flat in flats.values())
    )
    assert (
        all(
            numel % 8 == 0 or not fqn
            for flat in flats.values()
            for fqn, numel in _starts(flat.pieces)
        )
        or not original
    )
    assert all(flat.padded == flat.numel for flat in flats.values()) or not original


def _starts(pieces: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
    """The first element of each piece."""
    begins = [sum(numel for _, numel in pieces[:index]) for index in range(len(pieces))]
    return [(fqn, begin) for (fqn, _), begin in zip(pieces, begins, strict=True)]


def test_a_unit_that_runs_twice_is_gathered_at_each_forward_and_reduced_once() -> None:
    text = TEXT.replace("num_layers = 3", "num_layers = 2, uses = 2")
    ops = [
        (op.kind, op.unit) for op in of_text(text, backward_prefetch="none")
        if op.kind in COLLECTIVES
    ]

    assert ops == [
        *[
            ("all_gather", unit)
            for unit in ["root", "blocks.0", "blocks.0", "blocks.1", "blocks.1"]
        ],
        *[
            (kind, unit) for unit in ["blocks.1", "blocks.0"]
            for kind in ("all_gather", "reduce_scatter")
        ],
        ("reduce_scatter", "root"),
    ]


def test_a_frozen_unit_is_never_reduced_and_one_before_all_trained_has_no_backward() -> None:
    text = TEXT.replace("\nprecision", '\nfrozen = ["blocks.[02].*"]\nprecision')
    ops = [
        (op.kind, op.unit) for op in of_text(text, backward_prefetch="none")
        if op.kind in COLLECTIVES
    ]

    assert ops == [
        *[("all_gather", unit) for unit in ["root", *BLOCKS, "blocks.2", "blocks.1"]],
        *[("reduce_scatter", unit) for unit in ["blocks.1", "root"]],
    ]


def test_a_unit_of_which_a_part_is_frozen_is_reduced() -> None:
    text = TEXT.replace(" }\nprecision", (
        ', use_orig_params = true }\nfrozen = ["blocks.1.*.bias"]\nprecision'
    ))
    reduced = [op.unit for op in of_text(text) if op.kind == "reduce_scatter"]

    assert reduced == ["blocks.2", "blocks.1", "blocks.0", "root"]


def test_a_unit_that_ran_first_and_once_more_is_placed_by_its_second_forward() -> None:
    """torch takes the place 0 for none (_exec_order_utils.py, record_post_forward)."""
    flats = flat_parameters(small_model(), num_shards=2, dtype="bfloat16", aligned=False)
    first, other, order = flats["blocks.0"], flats["blocks.1"], Order()
    for flat in (first, other, first, other):
        order.end(flat)
        flat.awaits_backward = True

    assert order.before(first) is other
    assert order.before(other) is first


def test_an_unused_unit_is_cut_and_nothing_else() -> None:
    text = TEXT.replace("num_layers = 3", 'num_layers = 3, unused = ["blocks.1"]')
    program = plan_of_text(text)
    units = {op.unit for op in program.steady if op.kind in COLLECTIVES}

    assert [op.unit for op in program.construction].count("blocks.1") == 2
    assert units == {"root", "blocks.0", "blocks.2"}


@pytest.mark.parametrize(("device", "made"), [("cpu", [1, 2, 2]), ("cuda", [1, 1, 1])])
def test_gradients_of_three_runs_are_added_up_in_place_on_a_device_and_anew_under_a_meter(
    device: Device, made: list[int]
) -> None:
    """One accumulator takes all of them in float32."""
    text = TEXT.replace("num_layers = 3", "num_layers = 2, uses = 3").replace('"bf16"', '"fp32"')
    program = plan_of_text(text, device=device)
    copies = [
        op for op in program.steady
        if op.kind == "copy" and op.unit == "blocks.1" and op.stream == "compute"
    ]
    whole = [
        [
            event for event in op.memory
            if isinstance(event, Alloc) and event.kind == "unsharded_gradients"
        ]
        for op in copies
    ]

    assert [len(allocs) for allocs in whole] == made
    assert [[kernel.operator for kernel in op.kernels].count("add") for op in copies] == [0, 1, 1]


TEXT = """model = { preset = "mlp-tiny", num_layers = 3 }
batch = { micro_batch = 2 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "fsdp1", dp_shard = 2 }
precision = { parameters = "bf16", reduce = "fp32" }
"""


def plan_of_text(text: str, *, device: Device = "cpu", **options: object) -> RankProgram:
    """The Program of rank 0 of a scenario, with other options."""
    case = parse(text.encode(), where="x.toml")
    return plan_scenario(
        derived(case, options=replace(case.options, **options)), device=device
    ).of_rank(0)


def of_text(text: str, **options: object) -> tuple[Op, ...]:
    """The steady step of rank 0."""
    return plan_of_text(text, **options).steady


@pytest.mark.parametrize(("old", "new", "wanted"), [
    ("dp_shard = 2", "dp_replicate = 2, dp_shard = 1",
     "strategy.dp_shard: expected at least 2, found 1"),
    ("\nprecision", '\nfrozen = ["*.bias"]\nprecision',
     "frozen: expected all parameters of root frozen or all trained, found both"),
    ("\nprecision", '\nfrozen = ["blocks.*"]\nwrapping = { every = "all" }\nprecision',
     "frozen: expected all parameters of root"),
    ("\nprecision", "\nwrapping = { every = 3 }\nprecision",
     "wrapping: .* has 3 modules, but FullyShardedDataParallel wraps one"),
])
def test_what_is_not_modelled_is_refused_by_name(old: str, new: str, wanted: str) -> None:
    with pytest.raises(ScenarioError, match=wanted):
        parse(TEXT.replace(old, new).encode(), where="x.toml")
