"""torch's FullyShardedDataParallel on a 1-D or 2-D mesh: a flat parameter per unit and the root's.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from zreal import torch_private
from zreal.meters.held_memory import state_tensors
from zreal.modules.initial_values import DTYPES, Make, by_unit
from zreal.modules.modules import Model
from zreal.modules.optimizers import make_optimizer, trained
from zreal.observer.subjects import Subject
from zsim.models.spec import ROOT
from zsim.scenario.scenario import Scenario

BACKWARD_PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None
}


def build(scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make) -> Subject:
    """Replace each unit's module of `model` by its wrapper, then wrap `model` itself. Each is made
    whole just before."""
    parameters = by_unit(scenario.model)
    for unit in scenario.model.inside_out:
        make(parameters[unit.fqn])
        model.set_submodule(unit.fqn, _wrapped(scenario, model.module_at(unit.fqn), mesh))
    make(parameters.get(ROOT, ()))
    root = _wrapped(scenario, model, mesh)

    def micro_batch(last: bool) -> AbstractContextManager[None]:
        sync = last or scenario.sync == "every"
        return nullcontext() if sync else cast(AbstractContextManager[None], root.no_sync())

    optimizer: torch.optim.Optimizer = make_optimizer(scenario.optimizer, trained(root))
    return Subject(
        module=root,
        optimizer=optimizer,
        micro_batch=micro_batch,
        states=lambda: state_tensors(optimizer),
        flat=lambda: torch_private.flat_parameters(root),
        clip=lambda norm: _clip(root, norm),
        whole=lambda kind: _whole(root, kind),
    )


def _wrapped(
    scenario: Scenario, module: torch.nn.Module, mesh: DeviceMesh
) -> FullyShardedDataParallel:
    options, device = scenario.options, torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return FullyShardedDataParallel(
        module,
        device_mesh=mesh,
        sharding_strategy=_sharding(options.sharding, hybrid=mesh.ndim > 1),
        mixed_precision=_policy(scenario),
        backward_prefetch=BACKWARD_PREFETCH[options.backward_prefetch],
        forward_prefetch=options.forward_prefetch,
        limit_all_gathers=options.limit_all_gathers,
        use_orig_params=options.use_orig_params,
        device_id=device,
    )


def _sharding(option: str, *, hybrid: bool) -> ShardingStrategy:
    if hybrid:
        return (
            ShardingStrategy.HYBRID_SHARD
            if option == "full"
            else torch_private.hybrid_shard_grad_op()
        )
    return ShardingStrategy.FULL_SHARD if option == "full" else ShardingStrategy.SHARD_GRAD_OP


def _policy(scenario: Scenario) -> MixedPrecision | None:
    """torch's policy for the scenario's 2-byte dtypes; None where all is float32."""
    precision = scenario.precision
    if precision.parameters == precision.reduce == "float32":
        return None
    narrow = None if precision.parameters == "float32" else DTYPES[precision.parameters]
    return MixedPrecision(param_dtype=narrow, reduce_dtype=DTYPES[precision.reduce])


def _clip(root: FullyShardedDataParallel, norm: float) -> Tensor:
    """Clip by the norm of all ranks' gradients, without torch's warning on a rank that has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"Called FSDP.clip_grad_norm_\(\) on rank \d+ with no gradients"
        )
        return root.clip_grad_norm_(norm)


def _whole(root: FullyShardedDataParallel, kind: str) -> dict[str, Tensor]:
    """Whole "parameters", or "gradients", which take the place of the parameters for good."""
    if kind == "gradients":
        with torch.no_grad():
            for parameter in root.parameters():
                parameter.copy_(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
    with (
        warnings.catch_warnings(),
        FullyShardedDataParallel.summon_full_params(root, writeback=False),
    ):
        named = root.named_parameters()
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().cpu().clone()
            for name, parameter in named
        }
