"""Laws of sharded training on real ranks: torch's own keep them, and each law finds its defect."""

from __future__ import annotations

from typing import Protocol

import pytest
import torch

from tests.zreal.testing import sharded_ranks
from zreal.testing import RankPool, RanksFailed, check_optimizer
from zreal.testing.sharded.collectives import DTYPES, NUMELS
from zreal.testing.sharded.optimizer import MODELS
from zsim.errors import ArgumentError

pytestmark = pytest.mark.gloo


class Pool(Protocol):
    def __call__(self, world_size: int) -> RankPool: ...


@pytest.mark.parametrize("world", [2, 3])
def test_gloos_collectives_keep_the_laws(rank_pool: Pool, world: int) -> None:
    cases = len(NUMELS) * len(DTYPES)
    assert rank_pool(world).run(sharded_ranks.collectives, "gloo") == [cases] * world


def test_ring_collectives_keep_the_laws(rank_pool: Pool) -> None:
    assert rank_pool(3).run(sharded_ranks.ring_collectives) == [9] * 3


@pytest.mark.parametrize("name", ["sharded", "ZeroRedundancyOptimizer"])
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_optimizers_step_as_one_process(rank_pool: Pool, name: str, world: int) -> None:
    assert rank_pool(world).run(sharded_ranks.optimizer, name) == [len(MODELS)] * world


@pytest.mark.parametrize("name", ["fully_shard", "DDP", "FSDP", "own", "own, no_sync"])
def test_wrapped_modules_train_as_one_process(rank_pool: Pool, name: str) -> None:
    assert rank_pool(3).run(sharded_ranks.module, name) == [6] * 3


def test_an_optimizer_in_place_of_a_function_that_makes_one_is_refused() -> None:
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ArgumentError, match="reference: expected a function .* found an AdamW; as"):
        check_optimizer(lambda parameters: made, made)  # type: ignore[arg-type]


BROKEN = {
    "collectives": {
        "another rank's piece": (
            "reduce_scatter_gives_a_piece_of_the_sum", "a tensor of 3 elements of torch.float32",
            "rank 0: its piece has ",
        ),
        "one rank": (
            "reduce_scatter_gives_a_piece_of_the_sum", "a tensor of 3 elements of torch.float32",
            "rank 1: its piece is of shape 0, expected 1",
        ),
        "a mean": (
            "reduce_scatter_gives_a_piece_of_the_sum", "a tensor of 3 elements of torch.float32",
            "",
        ),
        "in place": (
            "arguments_are_left_as_they_were", "a tensor of 3 elements of torch.float32", "",
        ),
        "backwards": (
            "all_gather_joins_pieces_in_order", "a tensor of 3 elements of torch.float32",
            "ranks 0-2: the whole has ",
        ),
    },
    "optimizer": {
        "undivided": (
            "steps_are_those_of_one_process", "parameter 0 of shape 1",
            "ranks 0-2: 2 of its way apart after 1 step, at most 1e-05 allowed",
        ),
        "loses the rest": (
            "steps_are_those_of_one_process", "parameter 0 of shape 1",
            "ranks 0-2: 1 of its way apart after 1 step",
        ),
        "kept by rank 0": ("ranks_hold_the_same", "parameter 0 of shape 1", "ranks 1, 2: it has "),
        "not reduced": ("ranks_hold_the_same", "parameter 0 of shape 1", ""),
    },
    "module": {
        "undivided": (
            "gradients_are_the_mean_of_ranks", "layers.1.bias of shape 1",
            "ranks 0-2: 2 of its way apart after 1 step, at most 0.001 allowed",
        ),
        "unsynchronised": ("ranks_hold_the_same", "layers.1.bias of shape 1", ""),
        "a bias left out": ("ranks_hold_the_same", "layers.1.bias of shape 1", ""),
        "other values": ("parameters_start_as_the_modules", "layers.1.bias of shape 1", ""),
        "own, unnamed": (
            "parameters_start_as_the_modules", "layers.1.bias of shape 1",
            "ranks 0-2: it is missing",
        ),
        "own, dropped": (
            "micro_batches_without_sync_add_up", "layers.1.bias of shape 1", "ranks 0-2: ",
        ),
        "own, new gradient alone": ("ranks_hold_the_same", "layers.1.bias of shape 1", ""),
        "bfloat16": ("outputs_are_the_modules", "output 0 of shape 4 × 7", "rank 0: it has "),
    },
}
"""Defects by what is held to laws: the law that each breaks, the tensor, and the difference."""


@pytest.mark.quality
@pytest.mark.parametrize("kind", BROKEN)
def test_a_law_finds_what_breaks_it(rank_pool: Pool, kind: str) -> None:
    told = rank_pool(3).run(sharded_ranks.errors, kind, [*BROKEN[kind]])
    for name, (law, tensor, how) in BROKEN[kind].items():
        begins = f"{law}: expected it to hold, found {tensor} over 3 ranks: {how}"
        assert [each[name].startswith(begins) for each in told] == [True] * 3, (name, told)


@pytest.mark.quality
@pytest.mark.parametrize(("what", "error"), [
    ("batch", "batch: expected another batch on each rank, found the same on all"),
    ("loss", "loss: expected a loss that moves a parameter"),
])
def test_a_check_that_no_wrapper_could_fail_is_refused(
    rank_pool: Pool, what: str, error: str
) -> None:
    with pytest.raises(RanksFailed) as failed:
        rank_pool(2).run(sharded_ranks.vacuous, what)
    assert error in str(failed.value)


@pytest.mark.quality
def test_masked_outputs_hide_no_difference(rank_pool: Pool) -> None:
    assert rank_pool(2).run(sharded_ranks.masked, 0.0) == [6] * 2
    with pytest.raises(RanksFailed) as failed:
        rank_pool(2).run(sharded_ranks.masked, 100.0)
    assert "outputs_are_the_modules: expected it to hold" in str(failed.value)
