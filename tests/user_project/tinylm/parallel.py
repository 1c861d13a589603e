"""The model over a mesh: what is wrapped, and what ranks do together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tinylm.model import TinyLM


def sharded(model: TinyLM, mesh: DeviceMesh) -> TinyLM:
    """The model with each block a unit of fully_shard, and the rest in the root's."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mean_loss(loss: Tensor) -> float:
    """The mean of all ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def total_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients, of which each rank has a shard."""
    squares = [p.grad.to_local().square().sum() for p in model.parameters()]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt()
