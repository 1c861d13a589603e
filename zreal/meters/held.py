"""What a rank holds from step to step, seen on the tensors themselves: parameters, gradients and
optimizer states.

The meter counts bytes without knowing what they are for; these three kinds are known by where their
tensors hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def held(
    *, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None], states: Iterable[Tensor]
) -> Mapping[str, int]:
    """Bytes of each kind; a storage that several tensors share counts once, and for the first kind
    that has it."""
    seen: set[int] = set()
    kinds = {"parameters": parameters, "gradients": gradients, "optimizer_states": states}
    return {
        kind: sum(_fresh(tensor, seen) for tensor in tensors if tensor is not None)
        for kind, tensors in kinds.items()
    }


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that a plain optimizer of torch keeps for its parameters."""
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _fresh(tensor: Tensor, seen: set[int]) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    storage = local.detach().untyped_storage()
    if storage.data_ptr() in seen or not storage.size():
        return 0
    seen.add(storage.data_ptr())
    return storage.size()
