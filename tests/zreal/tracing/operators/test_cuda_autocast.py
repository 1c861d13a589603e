"""CUDA's autocast on a CPU's fake tensors, held to torch's own kernels for CUDA.

A torch without CUDA runs these on fake tensors of CUDA, as long as nothing records gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.installed_torch import TORCH
from zreal import torch_private
from zreal.tracing.fakes import cuda_autocast
from zreal.tracing.fakes.cuda_autocast import CudaAutocast
from zreal.tracing.module_values import tensors_in

Make = Callable[..., Tensor]
POLICIES = (
    cuda_autocast.NARROWED, cuda_autocast.WIDENED, cuda_autocast.WIDE_RESULTS, cuda_autocast.WIDEST,
)
RECURRENT = {
    "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell",
    "rnn_tanh_cell",
}
"""Cells, which run as products of their own kernels on a CPU."""
OF_CUDNN = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}


class Calls(TorchDispatchMode):
    """Each operator in order, with the dtypes of its results; what makes inputs is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if not name.startswith(("prim", "empty", "zeros", "ones")):
            self.seen.append((name, [str(tensor.dtype) for tensor in tensors_in(result)]))
        return result


@contextmanager
def of_cuda() -> Iterator[None]:
    """torch.autocast of CUDA, which its own class turns off without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_dtype("cuda", before)
        torch.set_autocast_enabled("cuda", False)


@contextmanager
def on_a_cpu() -> Iterator[None]:
    with CudaAutocast(), torch.autocast("cpu", torch.bfloat16):
        yield


def calls(
    run: Callable[[Make, Make, Make], object], *, device: str,
    autocast: Callable[[], AbstractContextManager[None]],
) -> list[tuple[str, list[str]]]:
    def narrow(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device, dtype=torch.int64)

    with torch_private.fake_mode(), torch.no_grad(), autocast(), Calls() as log:
        run(narrow, wide, whole)
    return log.seen


F = functional


def experts(x: Tensor, router: Tensor, weight: Tensor) -> Tensor:
    """The loss of a whole layer, in whose casts each follows from those before."""
    x = F.layer_norm(x, (8,))
    chosen = F.linear(x, router).softmax(-1)
    mixed = torch.einsum("btd,edh,bte->bth", x, weight, chosen)
    return F.mse_loss(F.gelu(mixed).norm(dim=-1), chosen.sum(-1)) + mixed.pow(2).mean()


CASES: dict[str, Callable[[Make, Make, Make], object]] = {
    "linear": lambda n, w, i: F.linear(w(4, 8), w(16, 8), w(16)),
    "matmul": lambda n, w, i: w(2, 3, 4) @ n(4, 5),
    "bmm": lambda n, w, i: torch.bmm(w(2, 3, 4), n(2, 4, 5)),
    "baddbmm": lambda n, w, i: torch.baddbmm(n(2, 3, 5), w(2, 3, 4), n(2, 4, 5)),
    "einsum": lambda n, w, i: torch.einsum("ij,kj->ik", w(4, 8), w(3, 8)),
    "mv": lambda n, w, i: torch.mv(w(4, 8), w(8)),
    "convolution": lambda n, w, i: F.conv1d(w(2, 3, 8), w(4, 3, 3), w(4)),
    "prelu": lambda n, w, i: F.prelu(w(2, 3), w(3)),
    "layer_norm": lambda n, w, i: F.layer_norm(n(4, 8), (8,), w(8), w(8)),
    "rms_norm": lambda n, w, i: torch.ops.aten.rms_norm(n(4, 8), (8,), w(8)),
    "group_norm": lambda n, w, i: F.group_norm(n(2, 8, 4), 2, w(8), w(8)),
    "softmax": lambda n, w, i: n(4, 8).softmax(-1),
    "softmax to a dtype": lambda n, w, i: n(4, 8).softmax(-1, dtype=torch.bfloat16),
    "softmax of float32": lambda n, w, i: w(4, 8).softmax(-1),
    "softmax of float16": lambda n, w, i: n(4, 8).half().softmax(-1),
    "log_softmax of float16": lambda n, w, i: F.log_softmax(n(4, 8).half(), -1),
    "layer of experts": lambda n, w, i: experts(w(2, 4, 8), w(3, 8), w(3, 8, 16)),
    "log_softmax": lambda n, w, i: F.log_softmax(n(4, 8), -1),
    "cross_entropy": lambda n, w, i: F.cross_entropy(n(4, 8), i(4)),
    "cross_entropy of float32": lambda n, w, i: F.cross_entropy(w(4, 8), i(4)),
    "mse_loss": lambda n, w, i: F.mse_loss(n(4), w(4)),
    "kl_div": lambda n, w, i: F.kl_div(n(4, 8), n(4, 8), reduction="sum"),
    "with logits": lambda n, w, i: F.binary_cross_entropy_with_logits(n(4), w(4)),
    "gelu": lambda n, w, i: F.gelu(n(4)),
    "silu": lambda n, w, i: F.silu(n(4)),
    "softplus": lambda n, w, i: F.softplus(n(4)),
    "exp": lambda n, w, i: n(4).exp(),
    "square": lambda n, w, i: n(4) ** 2,
    "power": lambda n, w, i: n(4) ** n(4),
    "power of 2": lambda n, w, i: 2 ** n(4),
    "rsqrt": lambda n, w, i: n(4).rsqrt(),
    "logsumexp": lambda n, w, i: n(4, 8).logsumexp(-1),
    "sum": lambda n, w, i: n(4, 8).sum(),
    "sum of rows": lambda n, w, i: n(4, 8).sum(1),
    "mean": lambda n, w, i: n(4, 8).mean(1),
    "cumsum": lambda n, w, i: n(4, 8).cumsum(1),
    "prod": lambda n, w, i: n(4, 8).prod(),
    "norm": lambda n, w, i: n(4, 8).norm(),
    "norm of rows": lambda n, w, i: torch.norm(n(4, 8), dim=1),
    "vector_norm": lambda n, w, i: torch.linalg.vector_norm(n(4, 8)),
    "normalize": lambda n, w, i: F.normalize(n(4, 8)),
    "cosine_similarity": lambda n, w, i: F.cosine_similarity(n(4, 8), n(4, 8)),
    "cdist": lambda n, w, i: torch.cdist(n(4, 8), n(4, 8)),
    "cat": lambda n, w, i: torch.cat([n(4), w(4)]),
    "stack": lambda n, w, i: torch.stack([n(4), n(4)]),
    "dot": lambda n, w, i: torch.dot(n(8), n(8)),
    "addcmul": lambda n, w, i: torch.addcmul(w(4), n(4), n(4)),
    "addcmul, narrow": lambda n, w, i: torch.addcmul(n(4), n(4), n(4)),
    "scatter_add": lambda n, w, i: torch.scatter_add(w(4), 0, i(4), n(4)),
    "index_put": lambda n, w, i: torch.index_put(w(4), [i(2)], n(2)),
    "where": lambda n, w, i: torch.where(n(4) > 0, n(4), w(4)),
    "reflect": lambda n, w, i: F.pad(n(2, 3, 4), (1, 1), mode="reflect"),
    "pool": lambda n, w, i: F.avg_pool3d(n(2, 3, 4, 4, 4), 2),
    "bilinear": lambda n, w, i: F.interpolate(n(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "nearest": lambda n, w, i: F.interpolate(n(1, 1, 4, 4), scale_factor=2),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operator_is_cast_as_torch_s_kernels_for_cuda_cast_it(case: str) -> None:
    if case == "rms_norm" and TORCH != "2.13":
        pytest.skip("torch before 2.13 has a fused one on CUDA alone")
    expected = calls(CASES[case], device="cuda", autocast=of_cuda)
    assert expected
    assert calls(CASES[case], device="cpu", autocast=on_a_cpu) == expected


def test_every_operator_that_cuda_s_autocast_has_is_in_one_policy() -> None:
    named = [name for names in POLICIES for name in names]
    assert len(named) == len(set(named))
    on_cuda, on_cpu = map(torch_private.with_kernels, ("AutocastCUDA", "AutocastCPU"))
    by_name = {each for each in on_cuda if "dimname" in each.lower() or ".names_" in each}
    known = {*named, *RECURRENT, *OF_CUDNN, *cuda_autocast.BANNED, *by_name}
    assert on_cuda - known <= on_cpu
    if TORCH == "2.13":  # an older one may lack some
        assert set(named) <= on_cuda


def test_a_cpu_s_autocast_is_its_own_again_afterwards() -> None:
    with torch_private.fake_mode(), on_a_cpu():
        pass
    narrow = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert narrow.softmax(-1).dtype == torch.bfloat16
        assert torch.cat([narrow, narrow.float()]).dtype == torch.float32


def test_a_weight_is_copied_once_until_the_cache_is_cleared() -> None:
    def copies(log: Calls) -> int:
        return sum(name == "_to_copy.default" for name, _ in log.seen)

    with torch_private.fake_mode(), CudaAutocast(), Calls() as log:
        x, weight = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(3, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            torch.einsum("ij,kj->ik", x, weight)
            torch.einsum("ij,kj->ik", x, weight)
            assert copies(log) == 1
        with torch.autocast("cpu", torch.bfloat16):
            torch.einsum("ij,kj->ik", x, weight)
        assert copies(log) == 2
