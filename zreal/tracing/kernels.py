"""The cost of a dispatched operator, as a Kernel: FLOPs by torch's own public formulas, bytes read
and written. Fused attention's FLOPs are those of its two or five products.

Views cost nothing and are no kernels. Operators without a formula count no FLOPs, only bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zreal.tracing import kernel_work
from zsim.ir.ops import CAST_LOGITS, Kernel
from zsim.models.training_options import DTYPE_NBYTES, Device

_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})
"""Operators that read as much of their first tensor as they write, not all of it."""
_UNREAD = dict.fromkeys(_LOOKUPS, 0) | {
    "nll_loss_forward": 0, "nll_loss2d_forward": 0, "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
}
"""Operators that do not read one of their tensors whole, and which: a loss of targets reads one
number of each row, its backward none."""

_NO_WORK = ("empty", "new_empty")
_FUSED_ATTENTION = "_scaled_dot_product_"
_CPU_ATTENTION = f"{_FUSED_ATTENTION}flash_attention_for_cpu"
_IS_CAUSAL = {
    _CPU_ATTENTION: 4,
    f"{_CPU_ATTENTION}_backward": 7,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
}
"""Operators of attention, and which of their arguments says whether it is causal."""
_LOSS = {
    "_log_softmax": "log_softmax", "_log_softmax_backward_data": "log_softmax",
    "nll_loss_forward": "nll_loss", "nll_loss_backward": "nll_loss",
}
"""Operators of a cross-entropy, and their names in the built-in families."""
_PASSES = (2, 3, 4)
"""Tensors as large as the logits that log_softmax may move (`zsim.autograd.aten.losses`)."""
_CAST_NBYTES = 6
"""Bytes that a cast between float32 and a dtype of two bytes moves for an element."""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products, and where their first factor stands."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def base_name(name: str) -> str:
    """ "addmm" of "aten::addmm.out"; other namespaces keep theirs: "mylib.scale"."""
    namespace, _, rest = name.partition("::")
    base = rest.partition(".")[0]
    return base if namespace == "aten" else f"{namespace}.{base}"


def written(
    func: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that an operator changes in place."""
    if func._schema.is_mutable:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                placed = position < len(arguments)
                yield from tensors([arguments[position] if placed else options.get(argument.name)])


def kernel(
    func: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any, *,
    device: Device = "cpu",
) -> Kernel | None:
    """The Kernel of one dispatched operator on `device`, or None when it moves nothing."""
    name = base_name(func.name())
    read = list(tensors((*arguments, *options.values())))
    written = list(tensors(result))
    in_place = name.endswith("_") or "out" in options
    sources = {id(tensor.untyped_storage()) for tensor in read}
    views = all(id(tensor.untyped_storage()) in sources for tensor in written)
    if not written or name.startswith(_NO_WORK) or (views and not in_place):
        return None
    unread = _UNREAD.get(name)
    nbytes = sum(map(_nbytes, written)) + sum(
        _nbytes(tensor) for position, tensor in enumerate(read) if position != unread
    )
    if name in _LOOKUPS:
        nbytes += _nbytes(written[0])
    nbytes += kernel_work.further_nbytes(name, arguments, device=device)
    dtype = next((t.dtype for t in written if t.dtype.is_floating_point), written[0].dtype)
    flops = _flops(func, name, arguments, options, result)
    shape = _shape(name, arguments)
    known = shape if all(shape) else ()
    transposed = bool(known) and name in _PRODUCTS and _is_transposed(*_factors(name, arguments))
    return Kernel(
        name, flops, nbytes, str(dtype).removeprefix("torch."), shape=known, transposed=transposed,
        singly=kernel_work.singly(func, name, read, written),
    )


def loss_named(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """`kernels` with those of a cross-entropy, and casts of its logits, named as in the built-in
    families: torch.compile makes one of them all."""
    named = [replace(each, operator=_LOSS.get(each.operator, each.operator)) for each in kernels]
    logits = {
        each.nbytes // (DTYPE_NBYTES[each.dtype] * passes)
        for each in named if each.operator == "log_softmax" for passes in _PASSES
    }
    return tuple(
        replace(each, operator=CAST_LOGITS)
        if each.operator == "_to_copy" and each.nbytes // _CAST_NBYTES in logits else each
        for each in named
    )


def _factors(name: str, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = arguments[_PRODUCTS[name] : _PRODUCTS[name] + 2]
    return first, second


def _is_transposed(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if the first factor lies transposed and the second does not, so that neither is
    contiguous along what they are summed over."""
    return first.stride(-1) != 1 and second.stride(-1) == 1


def _shape(name: str, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Shape of a product or of fused attention, as `zsim.ir.ops.Kernel` has it; () for any other
    operator."""
    if name in _PRODUCTS:
        first, second = (tensor.shape for tensor in _factors(name, arguments))
        return (first[0] if len(first) == 3 else 1, first[-2], second[-1], first[-1])
    if name in _IS_CAUSAL:
        query, key = (tensor.shape for tensor in arguments[name.endswith("backward") :][:2])
        return (query[0] * query[1], query[2], key[2], query[3])
    return ()


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; one that is expanded is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@cache
def _formula(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), rest.partition(".")[0])
    return flop_registry.get(packet)


def _flops(
    func: Any, name: str, arguments: tuple[Any, ...], options: dict[str, Any], result: Any
) -> int:
    if name.startswith(_FUSED_ATTENTION):
        return _attention_flops(name, arguments) // _halves(name, arguments, options)
    if (
        name == "_grouped_mm"
    ):  # a row or a column of what has no groups of its own meets one group of the other
        first, second = (tensor.shape for tensor in arguments[:2])
        return 2 * math.prod(first if len(second) == 3 else first[-2:]) * second[-1]
    formula = _formula(func.name())
    return (
        int(formula(*arguments, **options, out_val=result)) // _halves(name, arguments, options)
        if formula
        else 0
    )


def _attention_flops(name: str, arguments: tuple[Any, ...]) -> int:
    """FLOPs of two products in forward and five in backward, for each head of the query.

    Heads may share keys and values, of which torch 2.11 has no formula.
    """
    backward = name.endswith("backward")
    query, key, value = (tensor.shape for tensor in arguments[backward:][:3])
    depth = 3 * query[3] + 2 * value[3] if backward else query[3] + value[3]
    return 2 * math.prod(query[:3]) * key[2] * depth


def _halves(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """2 for causal attention, whose kernels leave out the upper half of the scores."""
    position = _IS_CAUSAL.get(name)
    return (
        2
        if position is not None
        and options.get("is_causal", *arguments[position : position + 1] or (False,))
        else 1
    )
