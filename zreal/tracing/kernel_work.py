"""Work of CUDA's kernels that their operands do not tell: further passes over memory, and elements
that are taken one by one.

Read from torch 2.13's sources (SoftMax.cu, layer_norm_kernel.cu, Indexing.cu, CUDALoops.cuh); on
the H200 and the H100 of tests/measured the built-in families take what was measured with the same
rules. It knows no module and no time.
"""

from __future__ import annotations

from typing import Any

import torch

from zsim.autograd.aten.losses import log_softmax_tensors
from zsim.models.training_options import Device

_COPIES = frozenset({"_to_copy", "clone", "copy_"})
_IN_PLACE = frozenset({"masked_fill_"})
"""Operators of single elements that torch does not mark as such."""
_CONDITIONS = frozenset({"where", "masked_fill", "masked_fill_", "native_dropout_backward"})
"""Operators that read a condition or a mask of bytes."""
_NORMS = frozenset({"native_layer_norm_backward", "_fused_rms_norm_backward"})
_LOG_SOFTMAX = {"_log_softmax": (0, 2), "_log_softmax_backward_data": (1, 3)}
"""Direction and operands of log_softmax."""


def further_nbytes(name: str, arguments: tuple[Any, ...], *, device: Device) -> int:
    """Bytes that a kernel moves beyond one pass over its operands."""
    if device == "cpu":
        return 0
    if name in _LOG_SOFTMAX:
        direction, operands = _LOG_SOFTMAX[name]
        logits = arguments[0]
        passes = log_softmax_tensors(
            logits.shape[arguments[1 + direction]], nbytes=logits.element_size(), device=device
        )
        return (passes[direction] - operands) * logits.nbytes
    if name == "_softmax_backward_data":  # the gradient is multiplied by the result first
        return 3 * int(arguments[0].nbytes)
    if name in _NORMS:  # input and gradient once more for the weight's gradient
        return 2 * int(arguments[0].nbytes)
    if name == "masked_fill":  # it fills a copy
        return 2 * int(arguments[0].nbytes)
    return 0


def singly(
    func: Any, name: str, read: list[torch.Tensor], written: list[torch.Tensor]
) -> int:
    """Elements that a kernel takes one by one: its operands lie otherwise than its result, or are
    cast.

    torch loads several at once where all operands lie alike in one dtype. Copies from float32 to
    two bytes have a kernel of their own, and conditions are read as they are. Numbers on the host
    become part of the kernel, but for `where`.
    """
    result = written[0]
    is_pointwise = torch.Tag.pointwise in func.tags or name in _COPIES | _IN_PLACE
    if not is_pointwise or not result.is_floating_point():
        return 0
    operands = [tensor for tensor in read if tensor.dim() or name == "where"]
    cast = any(
        tensor.dtype != result.dtype and not _is_taken_as_it_is(name, tensor, result)
        for tensor in operands
    )
    alike = all(_lies_like(tensor, result) for tensor in operands)
    return result.numel() if cast or not alike else 0


def _is_taken_as_it_is(name: str, tensor: torch.Tensor, result: torch.Tensor) -> bool:
    """True for an operand of another dtype than the result's that is not cast element by element.
    """
    if name in _COPIES:
        return tensor.dtype == torch.float32 and result.element_size() == 2
    return tensor.is_complex() or (name in _CONDITIONS and tensor.dtype == torch.bool)


def _lies_like(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True for a tensor whose elements lie in the order of those of `other`, without gaps, and are
    not repeated for it."""
    added = other.dim() - tensor.dim()
    shape, strides = (1,) * added + tuple(tensor.shape), (0,) * added + tensor.stride()
    same = sorted(
        (stride, size)
        for size, stride, of_other, as_other in zip(
            shape, strides, other.shape, other.stride(), strict=True
        )
        if size > 1 and size == of_other and stride == as_other
    )
    dense = 1
    for stride, size in same:
        if stride != dense:
            return False
        dense *= size
    return dense == other.numel()
