"""Claims of the texts on ZeRO and FSDP about time, line by line. Ψ parameters, N ranks, GB = 1e9
bytes.

Where a published figure is wrong, the docstring names it and says why.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.closed_forms import (
    MIXED_ADAM,
    pipeline_ns,
    smallest_batch,
    training_flops,
    zero3_communication_ns,
)
from tests.support.programs.small_programs import (
    ddp_bytes,
    one_unit,
    parameter_bytes,
    peak_unsharded_bytes,
    small_model,
    small_training,
    steady,
)
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.collectives import ring
from zsim.io.units import parse_rate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import ACCUMULATE, COLLECTIVES, Op
from zsim.memory.formulas import model_state_bytes
from zsim.models.checkpointing import Checkpointing
from zsim.models.families import mlp
from zsim.strategies import fsdp2, zero1, zero3

GB = 10**9


def compute_ns(num_parameters: int, sequence_length: int) -> int:
    """Nanoseconds of one sequence at 150 TFLOP/s."""
    return training_flops(num_parameters, num_tokens=sequence_length) * 10**9 // (150 * 10**12)


def test_t1_zero3_communication_of_seven_billion_hides_below_5_percent_at_15_sequences() -> None:
    taken = zero3_communication_ns(14 * GB, num_units=32, alpha_ns=10_000, bytes_per_s=100 * GB)
    assert taken == 420_960_000
    assert smallest_batch(taken, compute_ns_per_sequence=compute_ns(7 * GB, 2048), percent=5) == 15


@pytest.mark.parametrize(("billions", "layers"), [(7, 32), (13, 40), (70, 80)])
def test_t2_the_smallest_batch_does_not_depend_on_the_model(billions: int, layers: int) -> None:
    """Both sides are linear in Ψ. The published rows 13B → 8 and 70B → 2 are wrong."""
    taken = zero3_communication_ns(
        2 * billions * GB, num_units=layers, alpha_ns=10_000, bytes_per_s=100 * GB
    )
    assert (
        smallest_batch(taken, compute_ns_per_sequence=compute_ns(billions * GB, 2048), percent=5)
        == 15
    )


def test_t2_four_sequences_of_8192_are_enough() -> None:
    taken = zero3_communication_ns(14 * GB, num_units=32, alpha_ns=10_000, bytes_per_s=100 * GB)
    assert smallest_batch(taken, compute_ns_per_sequence=compute_ns(7 * GB, 8192), percent=5) == 4


@pytest.mark.parametrize(("gigabytes_per_s", "lookahead"), [(200, 1), (100, 1), (50, 1), (25, 2)])
def test_t3_the_published_rule_for_the_lookahead(gigabytes_per_s: int, lookahead: int) -> None:
    """k* = ceil(T_gather / T_compute), 200e6 parameters of 2 B, 10 ms of compute. Its 2 at 25 GB/s
    is wrong: see T4."""
    gather = ring.step_ns(2 * 200 * 10**6, alpha_ns=0, bytes_per_s=gigabytes_per_s * GB)
    assert -(-gather // 10_000_000) == lookahead


def test_t4_one_unit_ahead_saturates_the_link_and_more_gains_nothing() -> None:
    """32 layers, gather 16, compute 10: the rule of T3 asks for a lookahead of 2, which is no
    faster than 1."""
    times = [pipeline_ns([16] * 32, [10] * 32, lookahead=lookahead) for lookahead in (0, 1, 2, 3)]
    assert times == [832, 522, 522, 522]


def forward_time(ops: tuple[Op, ...], durations: dict[str, int]) -> int:
    """End of the last forward of a block, by streams and waits alone: the host costs nothing, the
    root neither."""
    ends: list[int] = []
    free: Counter[str] = Counter()
    for op in ops:
        start = max([free[op.stream], *(ends[index] for index in op.waits)])
        ends.append(start + (durations.get(op.kind, 0) if op.unit != "root" else 0))
        free[op.stream] = ends[-1]
    return max(end for op, end in zip(ops, ends, strict=True) if op.kind == "forward")


@pytest.mark.parametrize(("lookahead", "expected"), [(0, 832), (1, 522), (2, 522), (3, 522)])
def test_t4_the_streams_and_waits_of_zero3_take_as_long_as_its_closed_form(
    lookahead: int, expected: int
) -> None:
    model = mlp.build(
        mlp.MlpSizes(dims=(8,) * 33, hidden=16, num_classes=8), name="uniform", sequence_length=1
    )
    training = small_training(model)
    program = zero3.plan(
        training, mesh=Mesh(dp_shard=4), options=zero3.Options(lookahead=lookahead)
    )
    assert forward_time(steady(program), {"all_gather": 16, "forward": 10}) == expected


@pytest.mark.parametrize("gather", range(11))
def test_t4_one_unit_ahead_hides_all_gathers_but_the_first_if_they_are_not_longer_than_compute(
    gather: int
) -> None:
    assert pipeline_ns([gather] * 32, [10] * 32, lookahead=1) == gather + 320


def test_t4_more_than_one_unit_ahead_pays_for_uneven_units() -> None:
    gathers, computes = [2, 2, 30, 2, 2], [10, 10, 10, 10, 10]
    assert [pipeline_ns(gathers, computes, lookahead=lookahead) for lookahead in (0, 1, 2)] == [
        88, 72, 64
    ]


def test_t5_a_chain_of_n_minus_1_steps_costs_alpha_and_a_part_of_the_message_each() -> None:
    assert ring.num_steps("all_gather", 4 * GB, group_size=4) == 3
    taken = ring.duration_ns(
        "all_gather", 4 * GB, group_size=4, alpha_ns=5_000, bytes_per_s=100 * GB
    )
    assert taken == 3 * (5_000 + 10_000_000)


def test_t6_nvlink_4_moves_14_gigabytes_one_way_in_31_ms() -> None:
    """The published 15 ms divides by 900 GB/s, the sum of both directions; NCCL reaches 360 of 450
    each way."""
    assert ring.step_ns(14 * GB, alpha_ns=0, bytes_per_s=450 * GB) == 31_111_112
    assert ring.step_ns(14 * GB, alpha_ns=0, bytes_per_s=900 * GB) == 15_555_556
    assert load_cluster("dgx-h100").links.fabric.bandwidth == 360 * GB


def test_t7_hdr_infiniband_has_25_gigabytes_per_second_a_port() -> None:
    assert parse_rate("200 Gbit/s") == 25 * GB


def test_t8_checkpointing_every_block_computes_a_third_more() -> None:
    """Only blocks are checkpointed, not head and embedding. Recomputation stops before each block's
    last product."""
    again = Checkpointing(mode="full")
    cases = [small_training(), small_training(checkpointing=again)]
    programs = [
        zero3.plan(training, mesh=Mesh(dp_shard=4), options=zero3.Options()) for training in cases
    ]
    flops = [
        sum(
            kernel.flops for op in steady(each) if op.unit.startswith("blocks.")
            for kernel in op.kernels if kernel.operator != ACCUMULATE
        )
        for each in programs
    ]
    last = sum(
        kernel.flops for module in cases[0].modules if module.unit != "root"
        for kernel in module.forward.kernels[-2:]
    )
    assert flops[1] == flops[0] * 4 // 3 - last


@pytest.mark.parametrize("strategy", [zero3, fsdp2])
def test_t11_one_unit_for_the_whole_model_gathers_everything_before_any_compute(
    strategy: Any
) -> None:
    training = small_training(one_unit(small_model()))
    program = strategy.plan(training, mesh=Mesh(dp_shard=4), options=strategy.Options())
    forward = next(op.index for op in steady(program) if op.kind == "forward")
    before = [(op.kind, op.nbytes) for op in steady(program)[:forward] if op.kind in COLLECTIVES]
    assert before == [("all_gather", parameter_bytes(training))]
    assert peak_unsharded_bytes(program) == parameter_bytes(training)


@pytest.mark.parametrize("strategy", [zero3, fsdp2])
def test_t11_a_unit_per_block_never_has_the_whole_model_unsharded(strategy: Any) -> None:
    training = small_training()
    program = strategy.plan(training, mesh=Mesh(dp_shard=4), options=strategy.Options())
    assert peak_unsharded_bytes(program) < parameter_bytes(training)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_t12_zero1_sends_as_many_gradient_bytes_as_ddp_although_its_states_shrink_towards_a_quarter(
    n: int
) -> None:
    training = small_training()
    program = zero1.plan(training, mesh=Mesh(dp_shard=n), options=zero1.Options(form="all_reduce"))
    gradients = sum(
        ring.bytes_sent(op.kind, op.nbytes, group_size=n) for op in steady(program)
        if op.kind == "all_reduce"
    )
    assert gradients == ddp_bytes(training, n)
    state = model_state_bytes(GB, stage="zero1", num_ranks=n, state=MIXED_ADAM)
    assert state == 4 * GB + 12 * GB // n
