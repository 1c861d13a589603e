"""torch's own fully_shard on a 1-D or 2-D mesh: every unit, which is a module or a list of them,
then the root."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from zreal.meters.held_memory import state_tensors
from zreal.modules.initial_values import DTYPES
from zreal.modules.modules import Model
from zreal.modules.optimizers import make_optimizer, trained
from zreal.observer.subjects import Subject
from zsim.scenario.scenario import Scenario


def build(scenario: Scenario, model: Model, mesh: DeviceMesh) -> Subject:
    """`model` sharded in place. "auto" is fully_shard's None: units are resharded after forward,
    the root is not."""
    precision = scenario.precision
    plain = precision.parameters == precision.reduce == "float32"
    # Where parameters stay float32, naming that dtype would have fully_shard cast what autocast has
    # made narrow back.
    narrow = None if precision.parameters == "float32" else DTYPES[precision.parameters]
    policy = (
        MixedPrecisionPolicy()
        if plain
        else MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=DTYPES[precision.reduce])
    )
    asked = scenario.options.reshard_after_forward
    keep = None if asked == "auto" else asked
    place = (
        CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if scenario.options.offload
        else OffloadPolicy()
    )
    units = scenario.model.inside_out
    wrapped = {
        unit.fqn: [model.stretch(fqn) for fqn in unit.modules or (unit.fqn,)] for unit in units
    }
    for unit in [
        *(modules if len(modules) > 1 else modules[0] for modules in wrapped.values()), model
    ]:
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=keep, mp_policy=policy, offload_policy=place
        )
    sharded = cast(FSDPModule, model)
    unused = scenario.model.unused
    first = [
        cast(FSDPModule, wrapped[unit.fqn][0])
        for unit in scenario.model.units
        if unit.fqn in wrapped and unit.fqn not in unused
    ]
    over_replicas = getattr(scenario.options, "all_reduce", "every")
    _set_prefetch(
        first, forward=scenario.options.forward_prefetch,
        backward=scenario.options.backward_prefetch,
    )

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        sharded.set_requires_gradient_sync(last or scenario.sync == "every")
        sharded.set_requires_all_reduce(last or over_replicas == "every")
        # units in blocks return views, as linears make them; nobody changes those in place
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view "
                                                      "tensor")
            yield

    optimizer: torch.optim.Optimizer = make_optimizer(scenario.optimizer, trained(model))
    return Subject(
        module=model, optimizer=optimizer, micro_batch=micro_batch,
        states=lambda: state_tensors(optimizer),
    )


def _set_prefetch(units: list[FSDPModule], *, forward: int, backward: int) -> None:
    """Each unit prefetches the next `forward` ones and, in backward, the `backward` ones before it;
    0 leaves torch's default.

    The modules of one unit share a state, so that its first stands for it.
    """
    for place, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(cast(Any, units[place + 1 : place + 1 + forward]))
        if backward:
            unit.set_modules_to_backward_prefetch(
                cast(Any, units[max(0, place - backward) : place][::-1])
            )
