"""DTensor's placements are the same where a fake run seeks strided shards once; a run tells how far
it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    _sharding_prop,
    debug,
    distribute_tensor,
)

from zreal import backends, torch_private
from zsim.runs.backend import RunOptions
from zsim.scenario.scenario import parse

TEXT = """
model = { preset = "gpt-tiny" }
batch = { micro_batch = 1, sequence_length = 16 }
cluster = { preset = "cpu-gloo", ranks = 4 }
strategy = { name = "fsdp2" }
"""


def placements() -> list[Any]:
    """Placements and shapes of foreach ops on tensors of mixed placements."""
    mesh = init_device_mesh("cpu", (4,))
    some = [
        distribute_tensor(torch.ones(8, 3), mesh, [placement])
        for placement in (Shard(0), Replicate(), Shard(1))
    ]
    made = torch._foreach_add(torch._foreach_mul(some, some), some)
    assert all(isinstance(each, DTensor) for each in made)
    return [(each.placements, each.to_local().shape) for each in made]


@pytest.mark.skipif(
    not hasattr(_sharding_prop, "_propagate_use_strided_shard_flag"),
    reason=f"torch {torch.__version__} seeks no strided shards",
)
def test_placements_are_those_of_torch_alone_and_torch_is_as_it_was() -> None:
    original = _sharding_prop._propagate_use_strided_shard_flag
    with torch_private.fake_group(rank=1, world_size=4):
        quick = _sharding_prop._propagate_use_strided_shard_flag
        assert quick is not original
        ours = placements()
        debug._clear_sharding_prop_cache()
        _sharding_prop._propagate_use_strided_shard_flag = original
        assert ours == placements()
        _sharding_prop._propagate_use_strided_shard_flag = quick
    assert _sharding_prop._propagate_use_strided_shard_flag is original


def test_a_fake_run_tells_each_rank_and_how_many_collectives_it_has_issued() -> None:
    told: list[str] = []
    case = parse(TEXT.encode(), where="told.toml")
    backends.FakeBackend().run(case, options=RunOptions(ranks=(3,), progress=told.append))
    assert told[0].startswith("told: rank 3, all_gather #0 of ")
