"""DeepSpeed's own activation checkpointing on ranks that share no model: what its options keep."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zreal.meters.memory import MemoryMeter
from zreal.observer.subjects import deepspeed_engine
from zreal.processes import launch
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous

NUM_BLOCKS, BATCH, WIDTH = 4, 32, 64
INPUT = BATCH * WIDTH * 4
"""Bytes of each block's input."""
PARTITIONED = {"partition_activations": True}
CONTIGUOUS = PARTITIONED | {"contiguous_checkpointing": True, "num_checkpoints": NUM_BLOCKS}
OFF = {
    "partition_activations": False, "contiguous_checkpointing": False, "checkpoint_in_cpu": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {}, "partition_activations": PARTITIONED, "contiguous": CONTIGUOUS,
}

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: zsim[real,deepspeed]"
)


def checkpointing_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, dict[str, Any]]:
    """Bytes after each block of a forward, contiguous storages at its end, collectives of forward
    and backward, and gradients, by options."""
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    checkpointing = deepspeed_engine._deepspeed("cpu").checkpointing
    held = sys.modules[checkpointing.CheckpointFunction.__module__]
    blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))
    seen = {}
    for name, options in OPTIONS.items():
        checkpointing.configure(None, **(OFF | options))
        blocks.zero_grad()
        with MemoryMeter(log=True) as meter:
            meter.watch(*blocks.parameters())
            x = torch.ones(BATCH, WIDTH, requires_grad=True) + 0
            after = []
            for block in blocks:
                x = checkpointing.checkpoint(block, x)
                after.append(meter.allocated)
            buffers = [each for of_input in held.contiguous_data_buffers for each in of_input]
            storages = [each.untyped_storage() for each in buffers]
            x.sum().backward()
        seen[name] = {
            "after": after, "gradients": [each.grad.tolist() for each in blocks.parameters()],
            "storages": [each.nbytes() for each in {each.data_ptr(): each for each in storages}
                         .values()],
            "collectives": [label for label, _ in meter.events or [] if label.startswith("c10d")],
        }
    return seen


@needs_deepspeed
@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [1, 2])
def test_contiguous_checkpoints_of_a_rank_with_its_own_model_are_as_many_bytes_earlier(
    ranks: int
) -> None:
    """They are buffers for themselves, all made with the first; nothing is partitioned."""
    for seen in launch.launch(
        f"{__name__}:checkpointing_rank", {}, world_size=ranks, timeout_s=300
    ):
        more = {
            name: [
                (bytes_ - without) // INPUT
                for bytes_, without in zip(each["after"], seen["none"]["after"], strict=True)
            ]
            for name, each in seen.items()
        }
        assert more == {
            "none": [0] * NUM_BLOCKS, "partition_activations": [0] * NUM_BLOCKS,
            "contiguous": [3, 2, 1, 0],
        }
        assert seen["contiguous"]["storages"] == [INPUT] * NUM_BLOCKS
        for each in seen.values():
            assert each["collectives"] == []
            assert each["gradients"] == seen["none"]["gradients"]
