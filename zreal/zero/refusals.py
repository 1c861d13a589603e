"""Refusals of modules and optimizers that ZeRO cannot train, each by name and with its reason."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from zreal import torch_private
from zsim.errors import ArgumentError
from zsim.models.training_options import Optimizer

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose step of an element needs no other element. zsim counts their states."""
SHARDED = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)


def require_trainable(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, stage: int, accumulation: int,
    mesh: DeviceMesh | None = None,
) -> None:
    """ArgumentError for anything that ZeRO cannot train."""
    if stage not in (1, 2, 3):
        raise ArgumentError(where="stage", expected="1, 2 or 3", found=repr(stage))
    if not isinstance(accumulation, int) or accumulation < 1:
        raise ArgumentError(
            where="accumulation", expected="1 or more micro-batches", found=repr(accumulation)
        )
    if not dist.is_initialized():
        raise ArgumentError(
            where="process group", expected="one that is initialised", found="none",
            remedy='call torch.distributed.init_process_group("gloo") first, under torchrun',
        )
    if mesh is not None and (mesh.ndim > 2 or mesh.size() != dist.get_world_size()):
        raise ArgumentError(
            where="mesh", expected=f"one or two dims over all {dist.get_world_size()} ranks",
            found=f"a mesh of {' x '.join(map(str, mesh.shape))}",
            remedy="the last dim shards, the one before it has the replicas",
        )
    _require_plain(module)
    _require_elementwise(optimizer)
    _require_same(module, optimizer)


def _require_plain(module: nn.Module) -> None:
    for fqn, child in module.named_modules():
        where = fqn or type(module).__name__
        if isinstance(child, SHARDED):
            raise ArgumentError(
                where=where, expected="a plain module", found=type(child).__name__,
                remedy="give the module inside it: ZeRO shards and reduces by itself",
            )
        if child._backward_hooks or child._backward_pre_hooks:
            raise ArgumentError(
                where=where, expected="a module without backward hooks", found="one with them",
                remedy="remove them: they see gradients of one rank, in the middle of the Program",
            )
    for fqn, parameter in module.named_parameters():
        if torch_private.is_dtensor_type(type(parameter.data)):
            raise ArgumentError(
                where=fqn, expected="a whole parameter", found="a DTensor, sharded already",
                remedy="give the module before it is sharded",
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ArgumentError(
                where=fqn, expected="a parameter without hooks", found="one with them",
                remedy="remove them: they see gradients of one rank, before these are reduced",
            )


def _require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
    if type(optimizer) not in ELEMENTWISE:
        raise ArgumentError(
            where="optimizer", expected=f"torch's {names}", found=type(optimizer).__name__,
            remedy="shards cut parameters anywhere: an optimizer that looks at whole parameters, "
                   "or has states of its own, is not modelled",
        )
    for option in ("amsgrad", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ArgumentError(where=f"optimizer {option}", expected="False", found="True")
    if optimizer.state:
        raise ArgumentError(
            where="optimizer", expected="one that has not stepped", found="one with states",
            remedy="make it anew: its states are of whole parameters",
        )


def _require_same(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    wanted = {id(p): fqn for fqn, p in module.named_parameters() if p.requires_grad}
    numbers = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if missing := [fqn for key, fqn in wanted.items() if key not in set(numbers)]:
        raise ArgumentError(
            where="optimizer", expected="every parameter that requires a gradient",
            found=f"none of {missing[0]}", remedy="give it, or freeze it by requires_grad_(False)",
        )
    frozen = {id(p) for p in module.parameters() if not p.requires_grad}
    if any(key not in wanted and key not in frozen for key in numbers):
        raise ArgumentError(
            where="optimizer", expected="parameters of the module alone", found="another one",
            remedy="make it over module.parameters()",
        )


def param_group_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, int]:
    """Index of the optimizer's param group by the parameter's fqn."""
    index = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return {fqn: index[id(p)] for fqn, p in module.named_parameters() if id(p) in index}


def settings_of(
    optimizer: torch.optim.Optimizer, *, clip_norm: float, device: str
) -> Optimizer:
    """The optimizer in the words of a scenario, for its memory and kernels."""
    group = optimizer.param_groups[0]
    chosen = "foreach" if device == "cuda" else "for-loop"
    if group.get("foreach") is not None:
        chosen = "foreach" if group["foreach"] else "for-loop"
    return Optimizer(
        name="sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw",
        implementation="fused" if group.get("fused") else chosen,  # type: ignore[arg-type]
        learning_rate=float(group["lr"]), momentum=float(group.get("momentum", 0.0)),
        weight_decay=float(group["weight_decay"]), clip_norm=clip_norm,
    )
