"""Bytes that a rank holds from step to step: parameters, gradients and optimizer states.

The memory meter counts bytes without their purpose. These three kinds are told apart by the object
that refers to their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def held_bytes(
    *, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None], states: Iterable[Tensor],
    device: str | torch.device = "cpu",
) -> Mapping[str, int]:
    """Bytes by kind on a device of this type.

    A storage that several tensors share counts once, for the first kind. AdamW's step counters and
    what is offloaded lie in host memory while the rank has a GPU.
    """
    counted, where = set[int](), torch.device(device).type
    kinds = {"parameters": parameters, "gradients": gradients, "optimizer_states": states}
    return {
        kind: sum(
            _uncounted_bytes(tensor, counted) for tensor in tensors
            if tensor is not None and tensor.device.type == where
        )
        for kind, tensors in kinds.items()
    }


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors in the state of an optimizer of torch.optim."""
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _uncounted_bytes(tensor: Tensor, counted: set[int]) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.detach().untyped_storage()
    if storage.data_ptr() in counted or not storage.size():
        return 0
    counted.add(storage.data_ptr())
    return storage.size()
