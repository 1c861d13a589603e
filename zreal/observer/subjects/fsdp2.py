"""torch's fully_shard on a 1-D or 2-D mesh: every unit, a module or a list of them, then the root.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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

from zreal import torch_private
from zreal.meters.held_memory import state_tensors
from zreal.modules.initial_values import DTYPES, Make, by_unit
from zreal.modules.modules import Model
from zreal.modules.optimizers import make_optimizer, trained
from zreal.observer.subjects import Subject
from zsim.models.spec import ROOT
from zsim.scenario.scenario import Scenario


def build(scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make) -> Subject:
    """Shard `model` in place: its units inside out, then the model itself."""
    options = scenario.options
    wrapped = _shard(scenario, model, mesh, make)
    sharded = cast(FSDPModule, model)
    unused = scenario.model.unused
    used = [
        cast(FSDPModule, wrapped[unit.fqn][0])
        for unit in scenario.model.units
        if unit.fqn in wrapped and unit.fqn not in unused
    ]
    _set_prefetch(used, forward=options.forward_prefetch, backward=options.backward_prefetch)
    over_replicas = options.all_reduce_after

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        sharded.set_requires_gradient_sync(last or scenario.sync == "every")
        sharded.set_requires_all_reduce(last or over_replicas == "every")
        # units in blocks return views, as linears make them, which are never changed in place
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view "
                                                      "tensor")
            yield

    optimizer: torch.optim.Optimizer = make_optimizer(scenario.optimizer, trained(model))
    return Subject(
        module=model, optimizer=optimizer, micro_batch=micro_batch,
        states=lambda: state_tensors(optimizer), dtype=scenario.precision.stepped,
    )


def _shard(
    scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make
) -> dict[str, list[torch.nn.Module]]:
    """Call fully_shard on every unit and on `model`, each made whole just before; returns the
    modules of each unit by its fqn.

    "auto" is fully_shard's None: units are resharded after forward, the root is not.
    """
    options, precision = scenario.options, scenario.precision
    # Where parameters are not cast, a named dtype would have fully_shard cast autocast's narrow
    # outputs back.
    narrow = None if precision.parameters == precision.stepped else DTYPES[precision.parameters]
    policy = MixedPrecisionPolicy()
    if not precision.parameters == precision.reduce == precision.stepped:
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=DTYPES[precision.reduce])
    offload = OffloadPolicy()
    if options.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    reshard = options.reshard_after_forward
    wrapped: dict[str, list[torch.nn.Module]] = {
        unit.fqn: [model.module_at(fqn) for fqn in unit.modules or (unit.fqn,)]
        for unit in scenario.model.inside_out
    }
    parameters, stepped = by_unit(scenario.model), DTYPES[scenario.precision.stepped]
    for fqn, modules in (wrapped | {ROOT: [model]}).items():
        # small ones that the user's code has made at once would count although none is made whole
        with nullcontext() if scenario.model.made_whole else torch_private.no_modes():
            for name in parameters.get(fqn, ()):
                parameter = model.get_parameter(name)
                parameter.data = parameter.data.to(stepped)
        make(parameters.get(fqn, ()))
        fully_shard(
            modules if len(modules) > 1 else modules[0], mesh=mesh,
            reshard_after_forward=None if reshard == "auto" else reshard,
            mp_policy=policy, offload_policy=offload,
        )
    return wrapped


def _set_prefetch(units: list[FSDPModule], *, forward: int, backward: int) -> None:
    """Have each unit prefetch the next `forward` ones and, in backward, the `backward` before it.

    0 leaves torch's default. A unit is set through its first module, as its modules share a state.
    """
    for index, unit in enumerate(units):
        if forward:
            later = units[index + 1 : index + 1 + forward]
            unit.set_modules_to_forward_prefetch(cast(Any, later))
        if backward:
            earlier = units[max(0, index - backward) : index][::-1]
            unit.set_modules_to_backward_prefetch(cast(Any, earlier))
