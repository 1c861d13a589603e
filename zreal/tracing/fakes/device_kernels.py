"""Kernels that CUDA takes where a CPU takes others.

A module is traced on fake tensors of a CPU, since a torch without CUDA makes no others that record
gradients. Inside KernelChoices the calls that choose by device get CUDA's operators, whose shapes
torch knows for any device. Read from torch 2.13's sources (transformers/attention.cpp,
transformers/cuda/sdp_utils.cpp, flash_attn/flash_api.cpp, Dropout.cpp, layer_norm.cpp), not
confirmed on a GPU. Not here: cuDNN's and cuBLAS's workspaces, and the scratch of an embedding's
backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zreal import torch_private
from zreal.tracing.errors import refuse
from zreal.tracing.fakes.cuda_autocast import as_on_cuda
from zsim.autograd.aten.sdpa import (
    FLASH_WIDTHS,
    MAX_FLASH_HEAD,
    efficient_takes,
)
from zsim.models.training_options import Device

aten = torch.ops.aten
ATTEND, DROPOUT, RMS_NORM = (
    functional.scaled_dot_product_attention, functional.dropout, functional.rms_norm,
)
ONE_HOT = frozenset(
    {functional.one_hot, torch.ops.aten.one_hot, torch.ops.aten.one_hot.default}
)
"""one_hot, by the names under which a function mode sees a call of it."""


class KernelChoices(TorchFunctionMode):
    """Inside, functions that choose their kernel by device choose as on `device`. `seen`: there
    were such. For fake tensors only.

    A mode sees calls from outside of torch; what torch.nn.functional calls itself, as multi-head
    attention does, it finds by name.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.seen = False
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in ONE_HOT:
            _refuse_one_hot()
        replacement = _ON_CUDA.get(func)
        self.seen |= replacement is not None
        chosen = func if replacement is None or self._device == "cpu" else replacement
        return chosen(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        for name, (original, replacement) in _BY_NAME.items():
            setattr(functional, name, partial(self._named, original, replacement))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, (original, _) in _BY_NAME.items():
            setattr(functional, name, original)

    def _named(self, original: Any, replacement: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = True
        return (original if self._device == "cpu" else replacement)(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention with the kernel that CUDA takes: flash, else memory-efficient,
    else the composite."""
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    wide = query.shape[-1] != value.shape[-1]
    plain = query.dim() == 4 and not (is_causal and query.shape[-2] != key.shape[-2])
    two_bytes = query.dtype in (torch.bfloat16, torch.float16)
    options = {"dropout_p": dropout_p, "is_causal": is_causal}
    # of the width before it is padded
    scaled = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    mask = None if attn_mask is None else _added(attn_mask, query)
    if plain and two_bytes and mask is None and not wide and query.shape[-1] <= MAX_FLASH_HEAD:
        width, padding = query.shape[-1], -query.shape[-1] % FLASH_WIDTHS
        padded = [functional.pad(t, (0, padding)) if padding else t for t in (query, key, value)]
        flash = aten._scaled_dot_product_flash_attention
        output: Tensor = flash(*padded, **options, scale=scaled)[0]
        return output[..., :width] if padding else output
    fits = query.element_size() <= 4 and all(
        efficient_takes(t.shape[-1], nbytes=t.element_size()) for t in (query, value)
    )
    if plain and fits and not grouped:
        bias = None if mask is None else _bias(mask, query, key)
        keeps = any(t.requires_grad for t in (query, key, value))
        attend = aten._scaled_dot_product_efficient_attention
        return attend(
            query, key, value, bias, keeps and torch.is_grad_enabled(), **options, scale=scale
        )[0]
    composite = aten._scaled_dot_product_attention_math
    return composite(query, key, value, mask, **options, scale=scale, enable_gqa=enable_gqa)[0]


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """A mask that is added to the scores, as every kernel gets it."""
    if mask.dtype != torch.bool:
        return mask
    shown, unseen = (
        torch.scalar_tensor(value, dtype=query.dtype, device=mask.device)
        for value in (0.0, -math.inf)
    )
    return torch.where(mask, shown, unseen)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as memory-efficient attention takes it: of every head, and with rows whose length is a
    multiple of 16 in memory."""
    length = mask.shape[-1]
    if length % 16:
        mask = functional.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Tensor:
    """Dropout as one kernel, which keeps a mask of bytes; a CPU keeps one of the input's dtype."""
    if not (training and train) or inplace or not 0 < p < 1 or not input.numel():
        return DROPOUT(input, p, training and train, inplace)
    return aten.native_dropout(input, p, True)[0]


class _FusedRMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, of which a CPU runs its composite; called below autograd, so that it
    stays whole."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with torch_private.below_autograd():
            output, rstd = aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, rstd, *([] if weight is None else [weight]))
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, rstd, *weights = ctx.saved_tensors
        weight = weights[0] if weights else None
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch_private.below_autograd():
            grads = aten._fused_rms_norm_backward(
                gradients[0], input, ctx.shape, rstd, weight, wanted
            )
        return grads[0], None, grads[1] if wanted[1] else None, None


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # torch warns, and takes the composite
        return RMS_NORM(input, normalized_shape, weight, eps)
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return _FusedRMSNorm.apply(input, shape, weight, eps)


def _refuse_one_hot() -> None:
    """Refuse one_hot: on fake tensors its C++ makes an eighth more than on real ones (Onehot.cpp,
    torch 2.13)."""
    raise refuse(
        "one_hot", "operators that make of fake tensors what they make of real ones",
        "one_hot, which compares the index with all classes when traced",
        "write what torch runs on real tensors: index.new_zeros(*index.shape, "
        "num_classes).scatter_(-1, index.unsqueeze(-1), 1)",
    )


def _refuse_recurrent(*_: Any, **__: Any) -> None:
    raise refuse(
        "a recurrent layer", "operators whose memory follows from their shapes",
        "a fused kernel with a workspace of its own (oneDNN's on a CPU, cuDNN's on CUDA)",
        "write the recurrence with cells (nn.LSTMCell, nn.GRUCell), or leave the layer out",
    )


_ATTENTION = as_on_cuda("scaled_dot_product_attention", _attention)
_NORM = as_on_cuda("rms_norm", _rms_norm)
_ON_CUDA: Mapping[Any, Any] = {
    ATTEND: _ATTENTION,
    DROPOUT: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    RMS_NORM: _NORM,
    torch.rms_norm: _NORM,
    torch.lstm: _refuse_recurrent,
    torch.gru: _refuse_recurrent,
    torch.rnn_tanh: _refuse_recurrent,
    torch.rnn_relu: _refuse_recurrent,
}


_BY_NAME = {
    "scaled_dot_product_attention": (ATTEND, _ATTENTION),
    "dropout": (DROPOUT, _dropout),
    "rms_norm": (RMS_NORM, _NORM),
}


def require_known_memory(operator: str) -> None:
    """UntraceableError for an operator that allocates what its shapes do not tell."""
    if operator.startswith("mkldnn_rnn_layer"):
        _refuse_recurrent()
    if operator.startswith("_embedding_bag"):
        raise refuse(
            "an embedding bag", "operators whose memory follows from their shapes",
            "notes on each bag, which differ by device, mode and padding",
            "write it as an embedding and a sum, or leave the layer out",
        )
