"""Modules that enter CUDA's autocast themselves, or ask for it, traced without CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional

from zreal.tracing.errors import UntraceableError
from zreal.tracing.named_module import trace_named
from zreal.tracing.trace import trace
from zsim.autograd.traced.model import TracedModel

INPUTS = [((4, 8), torch.float32)]
Call = Callable[[nn.Linear, Tensor], Tensor]


class Module(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear, x).float().sum()


def traced(call: Call, *, autocast: Any = "none", device: Any = "cuda") -> TracedModel:
    return trace(lambda: Module(call), INPUTS, units=[], autocast=autocast, device=device)


def dtypes(model: TracedModel, operator: str) -> list[str]:
    """The dtypes of one operator's results in forward."""
    kernels = [kernel for module in model.lowered for kernel in module.forward.kernels]
    return [kernel.dtype for kernel in kernels if kernel.operator == operator]


class Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class WideProduct(Product):
    forward = staticmethod(
        custom_fwd(Product.forward.__wrapped__, device_type="cuda", cast_inputs=torch.float32)
    )


def inside(*args: Any, **options: Any) -> Call:
    """A linear layer inside a torch.autocast of its own."""

    def call(linear: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast(*args, **options):
            result: Tensor = linear(x)
        return result

    return call


@pytest.mark.parametrize(("call", "autocast", "expected"), [
    (inside("cuda", torch.bfloat16), "none", "bfloat16"),
    (inside("cuda"), "none", "float16"),
    (inside("cuda"), "bfloat16", "bfloat16"),
    (inside("cuda", torch.float32), "bfloat16", "float32"),
    (inside("cuda", enabled=False), "bfloat16", "float32"),
    (inside("cpu", enabled=False), "bfloat16", "float32"),  # x.device.type is that of the fakes
])
def test_an_autocast_inside_the_module_casts(call: Call, autocast: str, expected: str) -> None:
    model = traced(call, autocast=autocast)
    assert dtypes(model, "addmm") == [expected]
    assert model.devices == ("cuda",)


def test_a_module_without_autocast_stands_for_both_devices() -> None:
    model = traced(inside("cuda", enabled=False))
    assert model.devices == ("cpu", "cuda")
    assert traced(inside("cpu", torch.bfloat16), device="cpu").devices == ("cpu",)


@pytest.mark.parametrize(("function", "autocast", "expected"), [
    (Product, "bfloat16", "bfloat16"), (WideProduct, "bfloat16", "float32"),
    (Product, "none", "float32"),
])
def test_functions_of_custom_fwd_run_as_under_cuda_s_autocast(
    function: Any, autocast: str, expected: str
) -> None:
    model = traced(lambda linear, x: function.apply(x, linear.weight) + linear.bias,
                   autocast=autocast)
    assert dtypes(model, "mm") == [expected]


@pytest.mark.parametrize(("autocast", "enabled", "dtype"), [
    ("none", False, torch.float16), ("bfloat16", True, torch.bfloat16),
])
def test_a_module_that_asks_is_told_of_cuda(
    autocast: str, enabled: bool, dtype: torch.dtype
) -> None:
    answers = []

    def call(linear: nn.Linear, x: Tensor) -> Tensor:
        answers.append((
            torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
        ))
        result: Tensor = linear(x)
        return result

    traced(call, autocast=autocast)
    assert set(answers) == {(enabled, enabled, dtype)}


def test_what_cuda_s_autocast_refuses_is_refused() -> None:
    def loss(linear: nn.Linear, x: Tensor) -> Tensor:
        return functional.binary_cross_entropy(linear(x).sigmoid(), x)

    assert traced(loss)
    with pytest.raises(UntraceableError, match="take binary_cross_entropy_with_logits"):
        traced(loss, autocast="bfloat16")


def test_a_decorator_made_before_the_trace_is_refused_and_one_that_a_command_imports_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        early = torch.autocast("cuda", torch.bfloat16)
    with pytest.raises(UntraceableError, match="made before, as by a decorator"):
        traced(early(lambda linear, x: linear(x)))
    (tmp_path / "decorated_module.py").write_text(
        "import torch\nclass Decorated(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(8, 8)\n"
        "    @torch.autocast('cuda', dtype=torch.bfloat16)\n"
        "    def forward(self, x):\n        return super().forward(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (model,) = trace_named(
        "decorated_module:Decorated", ["4x8:float32"], dtype=None, device="cuda", recomputed=False,
        units=(),
    )
    del sys.modules["decorated_module"]
    assert dtypes(model, "addmm") == ["bfloat16"]


def test_a_trace_under_autocast_is_the_same_each_time_and_in_each_thread() -> None:
    def call(linear: nn.Linear, x: Tensor) -> Tensor:
        result: Tensor = linear(x)
        return result

    expected = traced(call, autocast="bfloat16")
    models: list[TracedModel] = []
    threads = [
        Thread(target=lambda: models.append(traced(call, autocast="bfloat16"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert models == [expected] * 3


def test_torch_is_as_it_was_after_an_error_inside_the_module() -> None:
    def fails(linear: nn.Linear, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cuda", True)
        raise RuntimeError("out of ideas")

    names = ("clear_autocast_cache", "is_autocast_enabled", "get_autocast_dtype")
    before = [getattr(torch, name) for name in names]
    with pytest.raises(UntraceableError, match="out of ideas"):
        traced(fails, autocast="float16")
    assert [getattr(torch, name) for name in names] == before
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    half = torch.ones(2, 2, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert half.softmax(-1).dtype == torch.float16
    assert "ToCopy" in str(half.softmax(-1, dtype=torch.float32).grad_fn.next_functions)
