"""torch's one_hot as it runs on real tensors: of fake ones, as of any subclass of Tensor, its C++
compares with all classes instead.

What it then makes, each class beside each index, is an eighth larger than what it makes of real
ones (aten/src/ATen/native/Onehot.cpp, seen on torch 2.13). It is the one such function that is
known, of some 190 that were run both ways, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zsim.models.training_options import Device

NAMES: frozenset[Callable[..., Any]] = frozenset(
    {functional.one_hot, torch.ops.aten.one_hot, torch.ops.aten.one_hot.default}
)
"""What a function mode sees of a call of it."""


def one_hot(
    original: Callable[..., Tensor], given: tuple[Any, ...], named: dict[str, Any], *,
    device: Device,
) -> Tensor:
    """`original(*given, **named)`, one of `NAMES`, by way of what it runs of real tensors on
    `device`.

    A CPU looks at the least and the largest index, CUDA at the largest alone and only where nobody
    says how many classes there are. RuntimeError with torch's words for a number of classes that
    cannot be.
    """
    index, num_classes = _arguments(*given, **named)
    if index.dtype != torch.int64:
        return original(*given, **named)  # which says so
    if not index.numel():
        if num_classes < 1:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return index.new_empty((*index.shape, num_classes))
    if device == "cpu":
        ends = torch.aminmax(index)
        num_classes = _counted(num_classes, ends[1])
        del ends
    elif num_classes == -1:
        num_classes = _counted(num_classes, index.max())
    if num_classes < 1:
        raise RuntimeError(
            "num_classes should be positive"
            if device == "cuda"
            else "Class values must be smaller than num_classes."
        )
    return torch.zeros(
        (*index.shape, num_classes), dtype=index.dtype, device=index.device
    ).scatter_(-1, index.unsqueeze(-1), 1)


def _arguments(*given: Any, **named: Any) -> tuple[Tensor, int]:
    """The index, which each of the names calls otherwise, and the number of classes, -1 where that
    follows from the index."""
    told: int = named.pop("num_classes") if "num_classes" in named else (*given[1:], -1)[0]
    return (*given, *named.values())[0], told


def _counted(num_classes: int, largest: Tensor) -> int:
    return int(largest.item()) + 1 if num_classes == -1 else num_classes
