"""Substitutes for DeepSpeed's kernels of qwZ and qgZ, which it has for GPUs alone.

Each makes zeros with the shapes and dtypes of the kernel of that name, in the order of its source
(csrc/quantization/pt_binding.cpp). Whatever calls them is DeepSpeed's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

Symmetric = 0


def quantize(values: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
    """Values of 8 `bits`, and the scales of their groups.

    The kernel's scales have a second dimension of 1, which NCCL gathers and gloo refuses.
    """
    scales = torch.zeros(groups)
    return torch.zeros(values.shape, dtype=torch.int8), scales


def swizzle_quant(
    values: Tensor, groups: int, bits: int, kind: int, pipeline: int, nodes: int, per_node: int
) -> tuple[Tensor, Tensor]:
    """Values of `bits`, two in a byte, and the scales of their groups."""
    scales = torch.zeros((groups, 1))
    return torch.zeros(values.numel() * bits // 8, dtype=torch.int8), scales


def quantized_reduction(
    values: Tensor, scales: Tensor, groups: int, reduced_groups: int, bits: int, kind: int,
    per_node: int,
) -> tuple[Tensor, Tensor]:
    """Sums over the ranks of a node, quantized again, and their scales."""
    reduced_scales = torch.zeros((reduced_groups, 1))
    *rows, columns = values.shape
    return torch.zeros((*rows, columns // per_node), dtype=torch.int8), reduced_scales


def dequantize(values: Tensor, scales: Tensor, groups: int, bits: int, kind: int) -> Tensor:
    """Values in fp16."""
    *rows, columns = values.shape
    return torch.zeros((*rows, columns * 8 // bits), dtype=torch.float16)
