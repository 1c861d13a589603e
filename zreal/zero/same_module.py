"""Ranks compare their modules before any of them is sharded.

A rank that started from other values would train another model, and no collective would fail."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zsim.errors import ArgumentError


def require_same_on_ranks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """ArgumentError where another rank has other parameters, by name, shape, dtype or value."""
    if dist.get_backend(group) == "fake":  # there are no other ranks
        return
    own = {fqn: _told(parameter) for fqn, parameter in module.named_parameters()}
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
    digests: list[Any] = [None] * group.size()
    dist.all_gather_object(digests, digest, group=group)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise ArgumentError(
            where="module", expected="the same parameters on every rank",
            found=f"others on rank {odd[0]} than on rank 0",
            remedy="seed every rank alike, as by torch.manual_seed(0), before the module is made, "
                   "or load the same state",
        )


def _told(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Shape, dtype, and two sums over the values where there are any."""
    kind = (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
    if parameter.is_meta:
        return kind
    with torch.no_grad():
        values = parameter.detach().double().flatten()
        return (*kind, values.sum().item(), values.abs().sum().item())
