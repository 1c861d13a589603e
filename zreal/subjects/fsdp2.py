"""torch's own fully_shard on a 1-D or 2-D mesh: every block, then the root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from zreal.held import state_tensors
from zreal.modules import DTYPES, Model
from zreal.optimizers import make_optimizer, trained
from zreal.subjects import Subject
from zsim.scenario import Scenario


def build(scenario: Scenario, model: Model, mesh: DeviceMesh) -> Subject:
    """`model` sharded in place. "auto" is fully_shard's None: blocks are resharded after forward, the root is not."""
    precision = scenario.precision
    plain = precision.parameters == precision.reduce == "float32"
    policy = (
        MixedPrecisionPolicy()
        if plain
        else MixedPrecisionPolicy(param_dtype=DTYPES[precision.parameters], reduce_dtype=DTYPES[precision.reduce])
    )
    asked = scenario.options.reshard_after_forward
    keep = None if asked == "auto" else asked
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if scenario.options.offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=keep, mp_policy=policy, offload_policy=place)
    fully_shard(model, mesh=mesh, reshard_after_forward=keep, mp_policy=policy, offload_policy=place)
    sharded = cast(FSDPModule, model)
    blocks = [cast(FSDPModule, block) for block in model.used_blocks]
    over_replicas = getattr(scenario.options, "all_reduce", "every")
    _set_prefetch(blocks, forward=scenario.options.forward_prefetch, backward=scenario.options.backward_prefetch)

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        sharded.set_requires_gradient_sync(last or scenario.sync == "every")
        sharded.set_requires_all_reduce(last or over_replicas == "every")
        yield

    optimizer: torch.optim.Optimizer = make_optimizer(scenario.optimizer, trained(model))
    return Subject(module=model, optimizer=optimizer, micro_batch=micro_batch, states=lambda: state_tensors(optimizer))


def _set_prefetch(blocks: list[FSDPModule], *, forward: int, backward: int) -> None:
    """Each block prefetches the next `forward` ones and, in backward, the `backward` ones before it; 0 leaves torch's default."""
    for place, block in enumerate(blocks):
        if forward:
            block.set_modules_to_forward_prefetch(cast(Any, blocks[place + 1 : place + 1 + forward]))
        if backward:
            block.set_modules_to_backward_prefetch(cast(Any, blocks[max(0, place - backward) : place][::-1]))
