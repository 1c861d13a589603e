"""Bytes that operators allocate on a device and that fake tensors do not show.

Source: torch 2.13 (flash_attn/flash_api.cpp, Loss.cpp, Col2Im.cpp, Im2Col.cpp and theirs for CUDA),
not confirmed on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zsim.autograd.aten.sdpa import EFFICIENT_ROWS, FLASH_ROWS, flash_columns, rounded_up
from zsim.models.training_options import Device

SIZED_BY_DEVICE = frozenset({"native_layer_norm"})
"""Operators with results that are larger on one device than on the other."""
_FLASH, _EFFICIENT = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
)

LOSSES_IN_PLACE = frozenset(
    {"mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"}
)
"""Losses whose single number keeps the room of all elements' losses."""
LOSSES_BESIDE = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that make those of all elements once more, or at all, while they add them up (on CUDA;
those of a CPU are not seen)."""
FOLDS = frozenset({"col2im", "im2col"})


def _each_loss_nbytes(arguments: tuple[Any, ...]) -> int:
    """Bytes of the loss of each element."""
    output, target = arguments[:2]
    dtype = torch.promote_types(output.dtype, target.dtype)
    return math.prod(torch.broadcast_shapes(output.shape, target.shape)) * dtype.itemsize


def result_nbytes(
    operator: str, arguments: tuple[Any, ...], position: int, tensor: Tensor, *, device: Device
) -> int:
    """Bytes that the result at `place` of an operator holds: its storage's but for those that real
    ones have of another size.

    Statistics of a layer norm are float32 on CUDA. Some losses make room for each element's and
    then one number of it, and folding begins with room for what it reads
    (aten/src/ATen/native/Loss.cpp, BinaryOps.cpp, Col2Im.cpp, Im2Col.cpp and theirs for CUDA).
    """
    nbytes = tensor.untyped_storage().nbytes()
    if operator in LOSSES_IN_PLACE:
        return max(nbytes, _each_loss_nbytes(arguments))
    if operator in FOLDS:
        return max(nbytes, arguments[0].numel() * arguments[0].element_size())
    if operator == "native_layer_norm" and position > 0 and device == "cuda":
        return 4 * tensor.numel()
    return nbytes


def scratch(operator: str, arguments: tuple[Any, ...], *, device: Device) -> tuple[int, ...]:
    """Bytes of what lives only while an operator runs on a device: attention's backward, as
    `zsim.autograd.aten.sdpa` has it for the built-in families, and some losses."""
    if device == "cuda" and operator in LOSSES_BESIDE and (*arguments[2:3], 1)[0] != 0:
        return (_each_loss_nbytes(arguments),)
    if device == "cpu" or operator not in (f"{_FLASH}_backward", f"{_EFFICIENT}_backward"):
        return ()
    query, key = arguments[1], arguments[2]
    sequences, heads, rows, width = query.shape
    if operator.startswith(_EFFICIENT):
        return (4 * sequences * heads * rounded_up(rows, EFFICIENT_ROWS),)
    row_nbytes, rounded = 4 * sequences * heads, rounded_up(rows, FLASH_ROWS)
    expanded = query.element_size() * sequences * heads * key.shape[-2] * width
    grouped = (expanded, expanded) if key.shape[1] != heads else ()
    return (row_nbytes * rounded, row_nbytes * rounded * flash_columns(width), *grouped)
