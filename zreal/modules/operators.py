"""Operators of a ModelSpec in eager torch, the very calls that the simulator counts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from zreal.modules.composites import composite_cross_entropy, composite_norm
from zreal.modules.initial_values import DTYPES
from zsim.models.operators import COMPOSITE, Operator

_ROTARY_BASE = 10000.0
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Kernels of scaled_dot_product_attention by the name in a scenario."""


def apply(
    op: Operator, values: Mapping[str, Tensor], *, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Run one operator on the `values` that it reads; a parameter that it lacks is None."""
    first = op.inputs[0]
    match op.kind:
        case "linear":
            return functional.linear(values[first], cast(Tensor, weight), bias)
        case "embedding":
            return functional.embedding(values[first], cast(Tensor, weight))
        case "positions":
            return values[first] + cast(Tensor, weight)[: values[first].shape[1]]
        case "layer_norm":
            return functional.layer_norm(values[first], (op.out_features,), weight, bias)
        case "rms_norm":
            if op.implementation == COMPOSITE:
                return composite_norm(values[first], cast(Tensor, weight))
            return functional.rms_norm(values[first], (op.out_features,), weight)
        case "gelu":
            return functional.gelu(values[first])
        case "swiglu":
            return functional.silu(values[first]) * values[op.inputs[1]]
        case "residual":
            return values[first] + values[op.inputs[1]]
        case "dropout":
            return _dropped(values[first], op.dropout)
        case "rotary":
            return _rotary(values[first], op)
        case "attention":
            return _attention(op, *(values[name] for name in op.inputs))
        case "cast":
            return values[first].to(torch.promote_types(values[first].dtype, DTYPES[op.dtype]))
        case "cross_entropy":
            logits, targets = values[first].flatten(0, -2), values[op.inputs[1]].flatten()
            if op.implementation == COMPOSITE:
                return composite_cross_entropy(logits, targets)
            return functional.cross_entropy(logits, targets)
        case _:
            raise AssertionError(op.name)  # transformers runs it itself, or build() refuses it


def seed_by(tokens: Tensor) -> None:
    """Seed a forward by its tokens alone, so that a rank and the reference drop out alike."""
    torch.manual_seed(zlib.crc32(tokens.cpu().numpy().tobytes()))


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def _rotary(x: Tensor, op: Operator) -> Tensor:
    half = op.head_dim // 2
    rates = _ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32, device=x.device), rates)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    left, right = torch.unflatten(x, -1, (op.num_heads, op.head_dim)).split(half, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2)


def _attention(op: Operator, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (
        _heads(query, op.num_heads), _heads(key, op.num_kv_heads), _heads(value, op.num_kv_heads),
    )
    if op.implementation != "explicit":
        backend = KERNELS.get(op.implementation)
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=op.causal, enable_gqa=op.num_kv_heads != op.num_heads,
                dropout_p=op.dropout,
            )
        return mixed.transpose(1, 2).flatten(-2)
    if op.num_kv_heads != op.num_heads:
        k, v = (t.repeat_interleave(op.num_heads // op.num_kv_heads, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-2, -1)) * op.head_dim**-0.5
    if op.causal:
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    mixed = _dropped(scores.softmax(dim=-1), op.dropout) @ v
    return mixed.transpose(1, 2).flatten(-2)


def _dropped(x: Tensor, share: float) -> Tensor:
    return functional.dropout(x, share) if share else x
