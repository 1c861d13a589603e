"""Strides and dtypes of operators' results, where fake tensors have others than real ones.

Fake tensors of torch 2.13 take some operators' results from a decomposition of them, which lays
them out as its own last step does. Real kernels allocate them as is said here, on a CPU and on CUDA
alike (Activation.cpp, BinaryOps.cpp, Loss.cpp, Normalization.cpp, SoftMax.cpp, group_norm.cpp,
layer_norm.cpp), but for roll, which CUDA makes anew. It matters to what reads the result: a product
copies what it cannot read as it lies. Operators that no popular model has on such arguments are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from zreal.tracing.errors import refuse
from zsim.models.training_options import Device

Lie = tuple[int, ...] | torch.memory_format
"""A tensor's strides, or the memory format that they follow from."""
Rule = Callable[[tuple[Any, ...]], "Lie | None"]
"""Layout of an operator's first result, by its arguments; None: as new tensors lie."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
STATISTICS = frozenset({"native_batch_norm", "native_layer_norm", "native_group_norm"})
"""Norms, whose statistics are of their weights' dtype; fake tensors have them in the input's."""


def _as_new(_: tuple[Any, ...]) -> None:
    """Layout of new tensors, whatever the arguments do."""


def _like(position: int) -> Rule:
    """Layout of torch.empty_like of the argument at `position`."""
    return lambda arguments: torch.empty_like(arguments[position]).stride()


def _channels_of(position: int) -> Rule:
    """Channels come last where they do in the argument at `place`, as its `suggest_memory_format`
    has it; else as new."""

    def lies(arguments: tuple[Any, ...]) -> torch.memory_format | None:
        tensor = arguments[position]
        last = CHANNELS_LAST.get(tensor.dim())
        keeps = (
            last is not None
            and not tensor.is_contiguous()
            and tensor.is_contiguous(memory_format=last)
        )
        return last if keeps else None

    return lies


def _element_by_element(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Strides that TensorIterator gives the output of an element-wise kernel, from its operands'.

    Two-byte operands are laid out as four-byte ones: torch would first widen an expanded one, and
    give its elements room of their own.
    """
    inputs = [argument for argument in arguments if isinstance(argument, Tensor)]
    alike = [
        torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=torch.float32, device=tensor.device
        )
        for tensor in inputs
    ]
    return (torch.add if len(alike) < 3 else torch.addcmul)(
        *alike, *[0] * (2 - len(alike))
    ).stride()


def _power(arguments: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Layout as element by element, but that of a number as new."""
    return _element_by_element(arguments) if isinstance(arguments[0], Tensor) else None


def _in_order(*places: int) -> Rule:
    """Layout by `_element_by_element` of the arguments at `places`, which the kernel goes through
    in that order."""
    return lambda arguments: _element_by_element(tuple(arguments[position] for position in places))


RULES: Mapping[str, Rule] = {
    "_log_softmax_backward_data": _as_new,
    "binary_cross_entropy": _like(0),
    "binary_cross_entropy_backward": _like(1),
    "elu_backward": _in_order(0, 5),
    "hardsigmoid_backward": _element_by_element,
    "hardswish_backward": _element_by_element,
    "hardtanh_backward": _element_by_element,
    "huber_loss": _like(0),
    "huber_loss_backward": _as_new,
    "leaky_relu_backward": _in_order(1, 0),
    "log_sigmoid_backward": _like(0),
    "log_sigmoid_forward": _as_new,
    "masked_fill": _as_new,
    "mish_backward": _element_by_element,
    "mse_loss": _element_by_element,
    "mse_loss_backward": _as_new,
    "native_batch_norm": _channels_of(0),
    "native_batch_norm_backward": _channels_of(1),
    "native_group_norm_backward": _channels_of(1),
    "native_layer_norm_backward": _as_new,
    "pow": _power,
    "roll": _channels_of(0),
    "rsub": _in_order(1, 0),
    "smooth_l1_loss": _element_by_element,
    "smooth_l1_loss_backward": _as_new,
    "soft_margin_loss_backward": _like(2),
    "softplus_backward": _element_by_element,
    "threshold_backward": _in_order(1, 0),
}
UNKNOWN = frozenset({
    "_prelu_kernel_backward", "channel_shuffle", "complex", "glu_backward", "polar",
    "reflection_pad2d_backward", "reflection_pad3d", "reflection_pad3d_backward",
    "replication_pad2d_backward", "replication_pad3d", "replication_pad3d_backward",
    "rrelu_with_noise_backward", "xlogy",
})
"""Operators of which fake tensors may lay results otherwise where an argument is not contiguous."""


def require_known_layout(operator: str, arguments: tuple[Any, ...]) -> None:
    """UntraceableError for an operator whose result nothing here lays as the real one lies."""
    if operator in UNKNOWN and not _all_contiguous(arguments):
        raise refuse(
            operator, "arguments that lie contiguously in memory",
            "one that does not, of which fake tensors lay the result otherwise than real ones",
            "call .contiguous() on it",
        )


def call(
    operator: OpOverload, arguments: tuple[Any, ...], options: Mapping[str, Any], *, device: Device
) -> Any:
    """The result of an operator on fake tensors, as the real one has it on `device`."""
    if operator is torch.ops.aten._grouped_mm.default:
        return _grouped_products(*arguments, **options)
    return as_real(operator, arguments, operator(*arguments, **options), device=device)


ALIGNED = 16
"""Bytes of which rows of grouped products have a multiple, and so must those of their factors."""


def _grouped_products(
    first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Room for products of groups as torch makes it, in any dtype; its own function for fake
    tensors takes bfloat16 alone.

    RuntimeError as of the real one (aten/src/ATen/native/GroupedMMUtils.h).
    """
    for factor in (first, second):
        if max(factor.stride()[-2:]) * factor.element_size() % ALIGNED:
            raise RuntimeError(f"strides should be multiple of {ALIGNED} bytes")
    rows, columns, dtype = first.shape[-2], second.shape[-1], out_dtype or first.dtype
    apart = ALIGNED // dtype.itemsize
    padded = -(-columns // apart) * apart
    alike = first.dim() == second.dim()
    groups = (
        first.shape[:-2]
        if alike and offs is None
        else offs.shape
        if alike and offs is not None
        else ()
    )
    strides = (rows * padded, padded, 1) if groups else (padded, 1)
    return torch.empty_strided((*groups, rows, columns), strides, dtype=dtype, device=first.device)


def as_real(
    operator: OpOverload, arguments: tuple[Any, ...], result: Any, *, device: Device
) -> Any:
    """The `result` of an operator on fake tensors as the real one on `device` is."""
    name = operator._schema.name.partition("::")[2]
    rule = (
        None
        if operator._schema.is_mutable
        else RULES.get(name, _element_by_element if _joins(operator, arguments) else None)
    )
    first = result[0] if isinstance(result, tuple | list) else result
    if rule is not None and isinstance(first, Tensor) and first.dim() > 1 and first.numel():
        dtype = arguments[1].dtype if name == "native_group_norm_backward" else first.dtype
        laid = _laid(
            first,
            rule(_promoted(arguments, first.dtype, of=name) if device == "cpu" else arguments),
            dtype,
        )
        result = (laid, *result[1:]) if isinstance(result, tuple | list) else laid
    if name in STATISTICS:
        result = _with_statistics(arguments, result)
    if name == "_weight_norm_interface" and first.dtype == torch.float16:
        result = (first, result[1].to(torch.float32))  # as fake tensors have it of bfloat16
    return result


def _joins(operator: OpOverload, arguments: tuple[Any, ...]) -> bool:
    """True if it makes a new tensor, element by element, of several that are not all contiguous."""
    if torch.Tag.pointwise not in operator.tags:
        return False
    inputs = [argument for argument in arguments if isinstance(argument, Tensor)]
    return len(inputs) > 1 and not _all_contiguous(inputs)


def _all_contiguous(arguments: Iterable[Any]) -> bool:
    return all(each.is_contiguous() for each in arguments if isinstance(each, Tensor))


def _promoted(arguments: tuple[Any, ...], result: torch.dtype, *, of: str) -> tuple[Any, ...]:
    """`arguments` as a CPU's kernel has them: those of another dtype than it works in are cast
    first, which gives expanded ones room."""
    if of == "where":
        return (arguments[0], *_promoted(arguments[1:], result, of=""))
    inputs = [argument for argument in arguments if isinstance(argument, Tensor)]
    if len({tensor.dtype for tensor in inputs}) < 2 and (
        not inputs or inputs[0].dtype.is_floating_point
    ):
        return arguments
    dtype = result if result.is_floating_point or len(inputs) != 2 else torch.result_type(*inputs)
    return tuple(
        torch.empty_like(each, dtype=dtype)
        if isinstance(each, Tensor) and each.dtype != dtype
        else each
        for each in arguments
    )


def _laid(tensor: Tensor, lies: Lie | None, dtype: torch.dtype) -> Tensor:
    layout = torch.contiguous_format if lies is None else lies
    strides = (
        layout
        if isinstance(layout, tuple)
        else torch.empty_like(tensor, memory_format=layout).stride()
    )
    if strides == tensor.stride() and dtype == tensor.dtype:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device=tensor.device)


def _with_statistics(arguments: tuple[Any, ...], result: Any) -> Any:
    first, *others = (argument for argument in arguments if isinstance(argument, Tensor))
    if not others or others[0].dtype == first.dtype:
        return result
    output, *statistics = result
    return (output, *(each.to(others[0].dtype) for each in statistics))
