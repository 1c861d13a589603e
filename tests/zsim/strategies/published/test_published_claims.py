"""Claims of the texts on ZeRO and FSDP about memory, line by line. Ψ parameters, N ranks, GB = 1e9
bytes.

Communication and time have files of their own. Where a published figure is wrong, the docstring
names it and says why.
"""

from __future__ import annotations

import pytest

from tests.support.closed_forms import BF16_ADAM, FP32_ADAM, MIXED_ADAM
from tests.support.programs.small_programs import (
    model_state_bytes_before_the_optimizer,
    small_training,
)
from zsim.ir.mesh import Mesh
from zsim.ir.sharding import FlatLayout, padded_size, shard, shards
from zsim.memory.formulas import StateBytes, ZeroStage, model_state_bytes
from zsim.strategies import ddp, zero1, zero2, zero3

GB = 10**9
STAGES: tuple[ZeroStage, ...] = ("ddp", "zero1", "zero2", "zero3")


def gigabytes(
    num_parameters: int, num_ranks: int, state: StateBytes = MIXED_ADAM
) -> dict[str, float]:
    """GB of model states per stage."""
    return {
        stage: model_state_bytes(num_parameters, stage=stage, num_ranks=num_ranks, state=state) / GB
        for stage in STAGES
    }


def test_m1_model_states_in_mixed_precision() -> None:
    """16Ψ · 4Ψ + 12Ψ/N · 2Ψ + 14Ψ/N · 16Ψ/N."""
    psi, n = 1_000_000, 8
    assert [
        model_state_bytes(psi, stage=stage, num_ranks=n, state=MIXED_ADAM) for stage in STAGES
    ] == [16 * psi, 4 * psi + 12 * psi // n, 2 * psi + 14 * psi // n, 16 * psi // n]


def test_m1_the_programs_of_each_stage_hold_what_the_formulas_say() -> None:
    training, n = small_training(), 4
    programs = {
        "ddp": ddp.plan(training, mesh=Mesh(dp_replicate=n), options=ddp.Options()),
        "zero1": zero1.plan(training, mesh=Mesh(dp_shard=n), options=zero1.Options()),
        "zero2": zero2.plan(training, mesh=Mesh(dp_shard=n), options=zero2.Options()),
        "zero3": zero3.plan(training, mesh=Mesh(dp_shard=n), options=zero3.Options()),
    }
    held = {
        stage: model_state_bytes_before_the_optimizer(program)
        for stage, program in programs.items()
    }
    psi = training.model.num_parameters
    assert held == {
        stage: model_state_bytes(psi, stage=stage, num_ranks=n, state=MIXED_ADAM)
        for stage in STAGES
    }


def test_m2_seven_billion_in_fp32_on_8_ranks() -> None:
    """ZeRO-1's 63 is 28 + 28 + 7: fp32 has no master copy, so the optimizer's states are 2·4 B a
    parameter."""
    assert gigabytes(7 * GB, 8, FP32_ADAM) == {"ddp": 112, "zero1": 63, "zero2": 38.5, "zero3": 14}


def test_m3_seven_billion_mixed_on_4_ranks() -> None:
    assert gigabytes(7 * GB, 4) == {"ddp": 112, "zero1": 49, "zero2": 38.5, "zero3": 28}


def test_m4_seven_billion_mixed_on_8_ranks() -> None:
    assert gigabytes(7 * GB, 8) == {"ddp": 112, "zero1": 38.5, "zero2": 26.25, "zero3": 14}


def test_m5_seven_billion_mixed_on_64_ranks() -> None:
    """Published 30.6 for ZeRO-1 and 17.1 for ZeRO-2 are wrong: 28 + 84/64 is 29.3 and 14 + 98/64 is
    15.5."""
    assert gigabytes(7 * GB, 64) == {"ddp": 112, "zero1": 29.3125, "zero2": 15.53125, "zero3": 1.75}


def test_m6_seven_billion_mixed_on_256_ranks() -> None:
    """Published 28.2 for ZeRO-1 is wrong: 28 + 84/256 is 28.33."""
    assert gigabytes(7 * GB, 256) == {
        "ddp": 112, "zero1": 28.328125, "zero2": 14.3828125, "zero3": 0.4375
    }


def test_m7_thirteen_billion_mixed() -> None:
    assert gigabytes(13 * GB, 1)["ddp"] == 208
    assert gigabytes(13 * GB, 8)["zero2"] == 48.75
    assert [gigabytes(13 * GB, n)["zero3"] for n in (32, 64)] == [6.5, 3.25]


def test_m8_thirty_billion_mixed_on_64_ranks() -> None:
    """Published 122 for ZeRO-1 and 61 for ZeRO-2 are wrong: 120 + 360/64 is 125.6 and 60 + 420/64
    is 66.6."""
    assert gigabytes(30 * GB, 64) == {"ddp": 480, "zero1": 125.625, "zero2": 66.5625, "zero3": 7.5}


def test_m9_reduction_factors_against_ddp() -> None:
    """N is 4, 8, 64 and without end; a billion ranks of as many parameters stand for the last."""
    factors = {
        stage: [
            round(16 * GB / model_state_bytes(GB, stage=stage, num_ranks=n, state=MIXED_ADAM), 1)
            for n in (4, 8, 64, GB)
        ]
        for stage in STAGES
    }
    assert factors == {
        "ddp": [1, 1, 1, 1], "zero1": [2.3, 2.9, 3.8, 4], "zero2": [2.9, 4.3, 7.2, 8],
        "zero3": [4, 8, 64, GB],
    }


def test_m10_four_weights_on_four_ranks() -> None:
    """Each rank keeps one weight of 2 B and borrows one at a time; that one moves whole, unpadded.
    """
    states = {
        stage: model_state_bytes(4, stage=stage, num_ranks=4, state=BF16_ADAM) for stage in STAGES
    }
    assert (states["ddp"], states["zero1"]) == (48, 24)
    layout = FlatLayout(numels=(1, 1, 1, 1), num_shards=4)
    kept, borrowed = 2 * layout.shard_numel, 2 * max(layout.numels)
    assert [len(layout.pieces(rank)) for rank in range(4)] == [1, 1, 1, 1]
    assert (kept + borrowed, 2 * layout.numel) == (4, 8)


def test_m11_seventy_billion_replicated_take_1_12_terabytes_on_every_rank() -> None:
    """Published as if those 1.12 TB were spread over 512 ranks: DDP does not divide them, every
    rank needs them all."""
    psi = 70 * GB
    assert (MIXED_ADAM.parameter * psi, MIXED_ADAM.gradient * psi) == (140 * GB, 140 * GB)
    assert (BF16_ADAM.optimizer * psi, (MIXED_ADAM.optimizer - BF16_ADAM.optimizer) * psi) == (
        560 * GB, 280 * GB,
    )
    assert {gigabytes(psi, n)["ddp"] for n in (1, 8, 512)} == {1120}


@pytest.mark.parametrize("n", [0, 1, 3, 7, 8, 97, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7, 64])
def test_m12_a_shard_is_a_ceiling_and_can_be_empty(n: int, num_ranks: int) -> None:
    size = -(-n // num_ranks)
    assert padded_size(n, num_ranks) == num_ranks * size
    assert [(part.start, part.stop) for part in shards(n, num_ranks)] == [
        (min(rank * size, n), min((rank + 1) * size, n)) for rank in range(num_ranks)
    ]
    assert shard(3, num_shards=4, rank=3).numel == 0
