"""Clipping by the global norm: its all-reduce, its bytes and its effect, as
torch.nn.utils.clip_grad_norm_ has them."""

from __future__ import annotations

import pytest

from tests.support.agreement import inexact
from tests.support.installed_torch import TORCH
from zreal import torch_private
from zreal.modules.numerics.reference import SingleProcess
from zreal.observer.observer import observe
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import Scenario, parse

CASES = [
    ('name = "fsdp2"', 2), ('name = "fsdp2"', 1),
    ('name = "hsdp", dp_replicate = 2, dp_shard = 2', 4), ('name = "ddp"', 2),
    ('name = "ddp", gradient_as_bucket_view = true', 2), ('name = "zero_redundancy"', 2),
    ('name = "zero1"', 2), ('name = "zero1", form = "all_reduce"', 2), ('name = "zero2"', 3),
    ('name = "zero3"', 3), ('name = "zero3"', 1), ('name = "fsdp1", dp_shard = 3', 3),
    ('name = "fsdp1", dp_replicate = 2, dp_shard = 2, use_orig_params = true', 4),
]


def scenario(
    strategy: str, ranks: int, *, clip_norm: float = 0.05, precision: str = "fp32"
) -> Scenario:
    text = f"""
model = {{ preset = "mlp-uneven" }}
batch = {{ micro_batch = 2, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{precision}", reduce = "fp32" }}
optimizer = {{ name = "sgd", learning_rate = 0.1, momentum = 0.9, clip_norm = {clip_norm} }}
"""
    return parse(text.encode(), where="clip.toml")


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [(*case, ("fp32", "bf16")[index % 2]) for index, case in enumerate(CASES)],
)
def test_order_bytes_and_memory_of_clipping_are_exact(
    strategy: str, ranks: int, precision: str
) -> None:
    case = scenario(strategy, ranks, precision=precision)
    assert inexact(case) == []


@pytest.mark.gloo
@pytest.mark.parametrize(("strategy", "ranks"), [
    CASES[0], CASES[9],
    *(pytest.param(*CASES[index], marks=pytest.mark.slow) for index in (2, 3, 6)),
])
def test_clipped_training_follows_the_reference_and_differs_from_unclipped(
    strategy: str, ranks: int
) -> None:
    run = find("gloo").run(scenario(strategy, ranks), options=RunOptions(all_ranks=True))
    numerics = [rank.numerics for rank in run.ranks if rank.numerics is not None]
    assert len(numerics) == ranks
    assert max(checked.largest_relative_difference for checked in numerics) < 1e-3
    steps = len(numerics[0].losses)
    unclipped = SingleProcess(scenario(strategy, ranks, clip_norm=0.0)).train(steps).losses
    by_step = zip(*(checked.losses for checked in numerics), strict=True)
    clipped = [sum(losses) / ranks for losses in by_step]
    assert clipped[0] == pytest.approx(unclipped[0])
    assert clipped[-1] > unclipped[-1]  # small steps go less far down


def test_the_norms_of_all_parameters_are_reduced_at_once_over_the_shards() -> None:
    case = scenario('name = "hsdp", dp_replicate = 2, dp_shard = 2', 4)
    run = SimBackend("cpu", torch=TORCH).run(case, options=RunOptions(all_ranks=True))
    reductions = [
        record for record in run.ranks[0].phases["steady"].collectives if record.op == "all_reduce"
    ]
    assert (reductions[-1].nbytes, reductions[-1].group) == (
        4 * len(case.model.parameters), "dp_shard",
    )


def test_a_rank_observed_after_another_of_the_same_mesh_uses_its_own_groups() -> None:
    """DTensor caches meshes by shape: rank 0 was handed the groups of rank 7, of which it is no
    member."""
    case = parse(
        b"""
model = { preset = "mlp-tiny" }
batch = { micro_batch = 2 }
cluster = { preset = "cpu-gloo", ranks = 8 }
strategy = { name = "hsdp", dp_replicate = 4, dp_shard = 2 }
optimizer = { name = "adamw", clip_norm = 1.0 }
""",
        where="test.toml",
    )
    for rank in (7, 0):
        with torch_private.fake_group(rank=rank, world_size=8):
            assert observe(case, rank=rank).run.rank == rank
