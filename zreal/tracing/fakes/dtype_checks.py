"""Operators that refuse tensors of several dtypes, or make others of them on fake tensors than on
real ones.

Meta kernels of torch 2.13 check less than those of devices: a product of float32 and bfloat16,
which no device makes, has a result there.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from zreal.tracing.errors import refuse

NORMS = ("batch_norm", "group_norm", "layer_norm")
ONE_DTYPE: dict[str, str] = {
    **dict.fromkeys(
        (
            "mm", "addmm", "mv", "addmv", "addbmm", "_cdist_forward", "mkldnn_rnn_layer",
            "_cudnn_rnn", "linalg_cross", "convolution", "_convolution",
            "convolution_overrideable", "mkldnn_convolution", "grid_sampler_2d", "grid_sampler_3d",
        ),
        "factors of one dtype",
    ),
    **dict.fromkeys(
        (
            "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy",
            "index_copy_",
        ),
        "source and destination of one dtype",
    ),
    **dict.fromkeys(
        (
            "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy", "huber_loss",
            "huber_loss_backward",
        ),
        "a loss whose input, targets and weights are of one dtype",
    ),
}
"""Operators that take one dtype alone, and that as a message expects it."""


def require_one_dtype(operator: str, inputs: Iterable[Tensor]) -> None:
    """UntraceableError for the first mixture of dtypes that real tensors would not run with, or run
    otherwise."""
    each = [
        str(tensor.dtype).removeprefix("torch.") for tensor in inputs if tensor.is_floating_point()
    ]
    dtypes, mixed_weights = list(dict.fromkeys(each)), len(set(each[1:])) > 1
    if len(dtypes) < 2:
        return
    mixture = " and ".join(dtypes)
    norm = any(kind in operator for kind in NORMS) and not operator.endswith("_backward")
    if norm and (dtypes[1] != "float32" or mixed_weights):  # the input comes first
        raise refuse(
            operator, "a norm whose weights and buffers are of its input's dtype, or all in "
            "float32", mixture, "cast its input, as by x.float(), or cast the module as a whole, "
            "as by .bfloat16(), with its buffers",
        )
    if operator in ONE_DTYPE:
        raise refuse(
            operator, f"{ONE_DTYPE[operator]}, as torch does", mixture,
            "cast one of them in the module",
        )
