"""torch's own fully_shard on a 1-D or 2-D mesh: every unit, which is a module or a list of them, then the root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zreal.held import state_tensors
from zreal.modules import DTYPES, Model
from zreal.optimizers import make_optimizer
from zreal.subjects import Subject
from zsim.model import ROOT
from zsim.scenario import Scenario


def build(scenario: Scenario, model: Model, mesh: DeviceMesh) -> Subject:
    """`model` sharded in place. "auto" is fully_shard's None: units are resharded after forward, the root is not."""
    precision = scenario.precision
    plain = precision.parameters == precision.reduce == "float32"
    policy = (
        MixedPrecisionPolicy()
        if plain
        else MixedPrecisionPolicy(param_dtype=DTYPES[precision.parameters], reduce_dtype=DTYPES[precision.reduce])
    )
    asked = scenario.options.reshard_after_forward
    keep = None if asked == "auto" else asked
    wrapped = [unit.modules or (unit.fqn,) for unit in scenario.model.units if unit.fqn != ROOT]
    units = [[model.stretch(fqn) for fqn in names] for names in wrapped]
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, reshard_after_forward=keep, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=keep, mp_policy=policy)
    sharded = cast(FSDPModule, model)
    first = [cast(FSDPModule, unit[0]) for unit in units]
    _set_prefetch(first, forward=scenario.options.forward_prefetch, backward=scenario.options.backward_prefetch)

    @contextmanager
    def micro_batch(sync: bool) -> Iterator[None]:
        sharded.set_requires_gradient_sync(sync)
        yield

    optimizer: torch.optim.Optimizer = make_optimizer(scenario.optimizer, list(model.parameters()))
    return Subject(module=model, optimizer=optimizer, micro_batch=micro_batch, states=lambda: state_tensors(optimizer))


def _set_prefetch(units: list[FSDPModule], *, forward: int, backward: int) -> None:
    """Each unit prefetches the next `forward` ones and, in backward, the `backward` ones before it; 0 leaves torch's default.

    The modules of one unit share a state, so that its first stands for it.
    """
    for place, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(cast(Any, units[place + 1 : place + 1 + forward]))
        if backward:
            unit.set_modules_to_backward_prefetch(cast(Any, units[max(0, place - backward) : place][::-1]))
