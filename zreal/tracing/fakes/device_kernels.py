"""What depends on the device: the kernels that CUDA takes where a CPU takes others, and bytes that
fake tensors do not show.

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
from zreal.tracing.errors import UntraceableError
from zreal.tracing.fakes.one_hot import NAMES, one_hot
from zsim.autograd.aten.sdpa import (
    EFFICIENT_ROWS,
    FLASH_ROWS,
    FLASH_WIDTHS,
    MAX_FLASH_HEAD,
    efficient_takes,
    flash_columns,
    rounded_up,
)
from zsim.models.training_options import Device

aten = torch.ops.aten
ATTEND, DROPOUT, RMS_NORM = (
    functional.scaled_dot_product_attention, functional.dropout, functional.rms_norm,
)
SIZED_BY_DEVICE = frozenset({"native_layer_norm", "_embedding_bag"})
"""Operators with results that are larger on one device than on the other."""
_FLASH, _EFFICIENT = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
)


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
        if func in NAMES:
            self.seen = True
            return one_hot(func, args, kwargs or {}, device=self._device)
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
    given = {"dropout_p": dropout_p, "is_causal": is_causal}
    # of the width before it is padded
    scaled = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    mask = None if attn_mask is None else _added(attn_mask, query)
    if plain and two_bytes and mask is None and not wide and query.shape[-1] <= MAX_FLASH_HEAD:
        width, padding = query.shape[-1], -query.shape[-1] % FLASH_WIDTHS
        padded = [functional.pad(t, (0, padding)) if padding else t for t in (query, key, value)]
        output: Tensor = aten._scaled_dot_product_flash_attention(*padded, **given, scale=scaled)[0]
        return output[..., :width] if padding else output
    fits = query.element_size() <= 4 and all(
        efficient_takes(t.shape[-1], nbytes=t.element_size()) for t in (query, value)
    )
    if plain and fits and not grouped:
        bias = None if mask is None else _bias(mask, query, key)
        keeps = any(t.requires_grad for t in (query, key, value))
        attend = aten._scaled_dot_product_efficient_attention
        return attend(
            query, key, value, bias, keeps and torch.is_grad_enabled(), **given, scale=scale
        )[0]
    composite = aten._scaled_dot_product_attention_math
    return composite(query, key, value, mask, **given, scale=scale, enable_gqa=enable_gqa)[0]


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """A mask that is added to the scores, as every kernel gets it."""
    if mask.dtype != torch.bool:
        return mask
    seen, unseen = (
        torch.scalar_tensor(value, dtype=query.dtype, device=mask.device)
        for value in (0.0, -math.inf)
    )
    return torch.where(mask, seen, unseen)


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
            found = aten._fused_rms_norm_backward(
                gradients[0], input, ctx.shape, rstd, weight, wanted
            )
        return found[0], None, found[1] if wanted[1] else None, None


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # torch warns, and takes the composite
        return RMS_NORM(input, normalized_shape, weight, eps)
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return _FusedRMSNorm.apply(input, shape, weight, eps)


def _refuse_recurrent(*_: Any, **__: Any) -> None:
    raise UntraceableError(
        where="a recurrent layer",
        expected="operators whose memory follows from their shapes",
        found="a fused kernel with a workspace of its own (oneDNN's on a CPU, cuDNN's on CUDA)",
        remedy="write the recurrence with cells (nn.LSTMCell, nn.GRUCell), or leave the layer out",
    )


_ON_CUDA: Mapping[Any, Any] = {
    ATTEND: _attention,
    DROPOUT: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    RMS_NORM: _rms_norm,
    torch.rms_norm: _rms_norm,
    torch.lstm: _refuse_recurrent,
    torch.gru: _refuse_recurrent,
    torch.rnn_tanh: _refuse_recurrent,
    torch.rnn_relu: _refuse_recurrent,
}


_BY_NAME = {
    "scaled_dot_product_attention": (ATTEND, _attention),
    "dropout": (DROPOUT, _dropout),
    "rms_norm": (RMS_NORM, _rms_norm),
}


def require_known_memory(operator: str) -> None:
    """UntraceableError for an operator that allocates what its shapes do not tell."""
    if operator.startswith("mkldnn_rnn_layer"):
        _refuse_recurrent()


LOSSES_IN_PLACE = frozenset(
    {"mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"}
)
"""Losses whose single number keeps the room of all elements' losses."""
LOSSES_BESIDE = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that make those of all elements once more, or at all, while they add them up (on CUDA;
those of a CPU are not seen)."""
FOLDS = frozenset({"col2im", "im2col"})
BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
BAG_DEFAULTS = (False, 0, False, None, False, -1)
"""Of an embedding bag's arguments behind its weights, indices and offsets: its mode is a sum, and
no index is padding."""


def _each_loss_nbytes(arguments: tuple[Any, ...]) -> int:
    """Bytes of the loss of each element."""
    given, target = arguments[:2]
    dtype = torch.promote_types(given.dtype, target.dtype)
    return math.prod(torch.broadcast_shapes(given.shape, target.shape)) * dtype.itemsize


def result_nbytes(
    operator: str, arguments: tuple[Any, ...], place: int, tensor: Tensor, *, device: Device
) -> int:
    """Bytes that the result at `place` of an operator holds: its storage's but for those that real
    ones have of another size.

    Statistics of a layer norm are float32 on CUDA, and what an embedding bag notes `_bag_numel`
    says. Some losses make room for each element's and then one number of it, and folding begins
    with room for what it reads (aten/src/ATen/native/Loss.cpp, BinaryOps.cpp, Col2Im.cpp,
    Im2Col.cpp and theirs for CUDA).
    """
    nbytes = tensor.untyped_storage().nbytes()
    if operator in LOSSES_IN_PLACE:
        return max(nbytes, _each_loss_nbytes(arguments))
    if operator in FOLDS:
        return max(nbytes, arguments[0].numel() * arguments[0].element_size())
    if operator == "native_layer_norm" and place > 0 and device == "cuda":
        return 4 * tensor.numel()
    if operator in BAGS and place > 0:
        return _bag_numel(operator, arguments, place, tensor, device=device) * tensor.element_size()
    return nbytes


def _bag_numel(
    operator: str, arguments: tuple[Any, ...], place: int, tensor: Tensor, *, device: Device
) -> int:
    """Elements of what an embedding bag notes: whose each index is, how many each bag has, and
    which are the largest.

    With `include_last_offset` there is one offset more than bags. On a CPU sums whose weights lie
    close, of up to four bytes and with no padding left out, do without the first, which otherwise
    has room for one more (aten/src/ATen/native/EmbeddingBag.cpp, `is_fast_path`); on CUDA only a
    maximum has the last (EmbeddingBag.cu).
    """
    given: list[Any] = [*arguments, *BAG_DEFAULTS[len(arguments) - 3 :]]
    weight, indices, offsets, _, mode, _, factors, _, padding = given
    if place == 1:
        close = factors is None or factors.stride(0) == 1
        is_fast = (
            mode == 0
            and close
            and padding < 0
            and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        )
        on_cpu = 0 if is_fast else int(indices.numel()) + 1
        return on_cpu if device == "cpu" else int(indices.numel())
    if place == 2 or (device == "cpu" and mode == 0 and operator.endswith("forward_only")):
        return int(offsets.numel())
    return 0 if device == "cuda" and mode != 2 else tensor.numel()


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
