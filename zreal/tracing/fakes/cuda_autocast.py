"""torch.autocast of CUDA on fake tensors of a CPU, where a torch without CUDA records no gradients.

Both devices cast arguments of products to the narrow dtype. Other operators differ: norms,
exponentials, softmax and sums are in float32 on CUDA alone, and a CPU casts pools and `cat`. Names
and policies are those of torch's ATen/autocast_mode.h; tests hold them to torch's own kernels for
CUDA, which take fake tensors where nothing records gradients. It knows no module and no strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zreal import torch_private
from zreal.tracing.errors import refuse
from zreal.tracing.module_values import tensors_in

Kernel = Callable[..., Any]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NARROWED = _names("""
    _convolution _scaled_dot_product_flash_attention addmv addr chain_matmul convolution einsum
    linalg_multi_dot mv prelu
""")
"""Operators whose arguments CUDA casts to the narrow dtype, beside those of a CPU."""
WIDENED = _names("""
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div
    l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist
    poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt
    sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss _upsample_bicubic2d_aa
    _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
""")
"""Operators whose arguments it casts to float32."""
WIDE_RESULTS = _names("""
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int
    norm.Scalar norm.ScalarOpt_dim prod prod.dim_int softmax.int sum sum.dim_IntList
""")
"""Operators that it asks for a result in float32, which read their argument as it is."""
WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
""")
"""Operators that it runs in the widest dtype of their arguments."""
BANNED = _names("binary_cross_entropy")
"""Operators that it refuses."""


class CudaAutocast:
    """Inside, torch.autocast of a CPU casts as that of CUDA does, and softmax as CUDA's.

    Copies of weights are kept until autocast's cache is cleared, as its own are.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> None:
        policies: list[tuple[frozenset[str], Callable[..., Any]]] = [
            (NARROWED, self._narrowed), (WIDENED, _widened), (WIDE_RESULTS, _wide_result),
            (WIDEST, self._widest),
        ]
        on_cuda = torch_private.with_kernels("AutocastCUDA")
        kernels: dict[str, Kernel] = {
            name: partial(policy, torch_private.operator(name))
            for names, policy in policies for name in names & on_cuda  # others are of newer torch
        }
        kernels |= dict.fromkeys(
            torch_private.with_kernels("AutocastCPU") - on_cuda, torch.library.fallthrough_kernel
        )
        kernels |= {name: partial(_refused, name) for name in BANNED & on_cuda}
        composites: dict[str, Kernel] = {
            "softmax.int": partial(_softmax, torch.ops.aten._softmax),
            "log_softmax.int": partial(_softmax, torch.ops.aten._log_softmax),
        }
        clear = torch.clear_autocast_cache
        with ExitStack() as stack:
            for key, replacing in (
                ("AutocastCPU", kernels), ("CompositeImplicitAutograd", composites)
            ):
                stack.enter_context(torch_private.replaced_kernels(key, replacing))
            stack.callback(self._copies.clear)
            stack.callback(setattr, torch, "clear_autocast_cache", clear)
            torch.clear_autocast_cache = partial(self._clear_all, clear)
            self._undo = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _clear_all(self, clear: Callable[[], None]) -> None:
        self._copies.clear()
        clear()

    def _narrowed(self, operator: Kernel, *args: Any, **options: Any) -> Any:
        with torch_private.no_autocast():
            return _called(operator, args, options, self._narrow)

    def _narrow(self, tensor: Tensor) -> Tensor:
        """`tensor` in the narrow dtype; the copy of a float32 leaf is kept."""
        dtype = _narrow_dtype()
        if not _is_cast(tensor) or tensor.dtype == dtype:
            return tensor
        is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf
        if not is_weight or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        known = self._copies.get(id(tensor))
        if known is None:
            known = self._copies[id(tensor)] = tensor, tensor.to(dtype)
        return known[1]

    def _widest(self, operator: Kernel, *args: Any, **options: Any) -> Any:
        wide = any(
            tensor.dtype == torch.float32 for tensor in tensors_in((args, options))
        )
        with torch_private.no_autocast():
            return _called(
                operator, args, options,
                partial(_to, dtype=torch.float32 if wide else _narrow_dtype()),
            )


def _narrow_dtype() -> torch.dtype:
    """The dtype of the innermost torch.autocast."""
    return torch.get_autocast_dtype("cpu")


def _widened(operator: Kernel, *args: Any, **options: Any) -> Any:
    with torch_private.no_autocast():
        return _called(operator, args, options, partial(_to, dtype=torch.float32))


def _refused(name: str, *_: Any, **__: Any) -> Any:
    raise refuse(
        name, "operators that CUDA's autocast takes", "one that it refuses, as float16 is too "
        "narrow for its gradient",
        "take binary_cross_entropy_with_logits, or torch.autocast(\"cuda\", enabled=False) around "
        "it",
    )


def as_on_cuda(name: str, function: Kernel) -> Kernel:
    """`function` for the operator called `name`, on arguments cast as by CUDA's autocast where one
    is on."""

    def called(*args: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **options)
        if name in WIDENED & torch_private.with_kernels("AutocastCUDA"):
            return _widened(function, *args, **options)
        with torch_private.no_autocast():
            narrow = partial(_to, dtype=_narrow_dtype())
            return _called(function, args, options, narrow)

    return called


def _wide_result(operator: Any, *args: Any, **options: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    named = dict(zip(names, args, strict=False)) | options
    if _is_cast(args[0]) and named.get("dtype") is None:
        named["dtype"] = torch.float32
    with torch_private.no_autocast():
        return operator.overloadpacket(named.pop(names[0]), **named)


def _softmax(
    kernel: Kernel, tensor: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Any:
    """softmax or its logarithm, of which CUDA has one `kernel` from float16 to float32; a CPU casts
    first (SoftMax.cpp)."""
    fused = tensor.dtype == torch.float16 and dtype == torch.float32
    return kernel(tensor if fused or dtype is None else tensor.to(dtype), dim, fused)


def _called(
    operator: Kernel, args: tuple[Any, ...], options: dict[str, Any],
    cast: Callable[[Tensor], Tensor],
) -> Any:
    """The result of `operator` on arguments that were cast, from the last to the first as compilers
    of C++ evaluate them."""
    last = {name: _cast(value, cast) for name, value in reversed(options.items())}
    return operator(*_cast(args, cast), **last)


def _cast(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, list | tuple):
        return type(value)([_cast(item, cast) for item in reversed(value)][::-1])
    return value


def _to(tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if _is_cast(tensor) else tensor


def _is_cast(value: Any) -> bool:
    """True for a tensor whose dtype autocast may change."""
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    )
