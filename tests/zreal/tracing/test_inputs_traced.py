"""Inputs of a user's module, and the dtype that it sees of its parameters: every phase and event
against torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.user_steps import DDP, FSDP1, FSDP2, HSDP
from tests.zreal.tracing.user_steps import differences as of_user_modules
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zsim.errors import ZsimError

WIDTH = 24
UNITS = [f"layers.{index}" for index in range(4)]
ZERO = 'name = "zero_redundancy"'
Data = Callable[[], tuple[Tensor, ...]]


differences = partial(of_user_modules, ranks=2, parameters="bf16", order=True)


class Denoiser(nn.Module):
    """A module of several floating-point inputs, some of which only the loss reads."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.embedding = nn.Embedding(11, WIDTH)
        self.wide = nn.Linear(WIDTH, 40 * WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, time: Tensor, label: Tensor, noise: Tensor) -> Tensor:
        x = x + self.embedding(label)
        x = x + noise * time[:, None] if self.mixes else x + torch.cos(time)[:, None].to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.wide(x)[:, :WIDTH], noise)


def denoised(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    size = 20
    x, time, noise = (
        torch.randn(size, WIDTH, dtype=dtype), torch.rand(size, dtype=dtype),
        torch.randn(size, WIDTH, dtype=dtype),
    )
    return x, time, torch.randint(11, (size,)), noise


@pytest.mark.parametrize(
    ("mixes", "strategy"), one_in(2, product([True, False], [FSDP2, FSDP1, HSDP]))
)
def test_all_floating_point_inputs_are_cast_before_the_root_gathers(
    mixes: bool, strategy: str, tmp_path: Path
) -> None:
    ranks = 4 if "hsdp" in strategy else 2
    assert (
        differences(lambda: Denoiser(mixes=mixes), denoised, strategy, tmp_path, ranks=ranks) == {}
    )


@pytest.mark.parametrize("strategy", [DDP, FSDP2])
def test_inputs_that_come_in_the_parameters_dtype_are_cast_by_nobody(
    strategy: str, tmp_path: Path
) -> None:
    assert differences(
        lambda: Denoiser(mixes=True), lambda: denoised(torch.bfloat16), strategy, tmp_path
    ) == {}


class Casts(nn.Module):
    """Casts its input to the dtype of a weight, which is float32 while that is sharded."""

    def __init__(self, cast: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.cast = cast
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cast(x, self.layers[0].weight)  # type: ignore[arg-type]
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().pow(2).mean()


CASTS: dict[str, Callable[[Tensor, nn.Parameter], Tensor]] = {
    "dtype": lambda x, weight: x.to(weight.dtype), "tensor": lambda x, weight: x.to(weight),
    "type": lambda x, weight: x.type_as(weight),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_root_that_asks_for_the_dtype_of_a_units_weight_is_refused_with_what_to_do(
    name: str
) -> None:
    with pytest.raises(UntraceableError, match=r"^layers\.0\.weight: expected a dtype that no "
                                               r"module asks for .*name the dtype in the module"):
        trace(lambda: Casts(CASTS[name]), (torch.randn(8, WIDTH),), dtype="bfloat16")
    assert trace(lambda: Casts(CASTS[name]), (torch.randn(8, WIDTH),)).modules


def test_a_module_that_casts_nothing_does_not_run_under_ddp_on_inputs_of_another_dtype(
    tmp_path: Path
) -> None:
    """Torch raises; whoever gives them in the parameters' dtype traces them so, or says that they
    come in it."""
    make = lambda: Casts(lambda x, weight: x)  # noqa: E731
    with pytest.raises(
        ZsimError,
        match=r"without the hooks of fully_shard.*factors of one dtype.*trace it with casts_input=False",  # noqa: E501
    ):
        differences(make, lambda: (torch.randn(8, WIDTH),), DDP, tmp_path)
    assert (
        differences(make, lambda: (torch.randn(8, WIDTH, dtype=torch.bfloat16),), DDP, tmp_path)
        == {}
    )


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda x, w: functional.linear(x, w),
    "layer norm": lambda x, w: functional.layer_norm(x, (WIDTH,), w[0], w[0]),
    "written": lambda x, w: x.index_put((torch.tensor([0]),), w[0]),
    "convolution": lambda x, w: functional.conv2d(x[None, None], w[None, None, :3, :3]),
    "cross-entropy": lambda x, w: functional.cross_entropy(
        w, torch.zeros(WIDTH, dtype=torch.int64), weight=x[0]
    ),
    "binary cross-entropy": lambda x, w: functional.binary_cross_entropy(w.sigmoid(), x.sigmoid()),
}


class Mixes(nn.Module):
    """Computes in float32 beside a weight of two bytes."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.mix, self.weight = mix, nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.mix(x.float(), self.weight).sum()
        return output


@pytest.mark.parametrize("name", MIXED)
def test_what_real_tensors_of_two_dtypes_do_not_do_is_no_trace_either(name: str) -> None:
    model, x = Mixes(MIXED[name]), torch.randn(WIDTH, WIDTH)
    model(x).backward()
    with pytest.raises(RuntimeError):
        model.bfloat16()(x).backward()
    with pytest.raises(UntraceableError, match="of one dtype|of its input's dtype|of the dtype "
                                               "of what"):
        trace(lambda: Mixes(MIXED[name]), (x,), units=[], dtype="bfloat16")


class Gains(nn.Module):
    """A module with a parameter of its own beside those of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.norm = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(x) @ self.gain
        return output


class Prompted(nn.Module):
    def __init__(self, *, frozen: int) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(1, WIDTH))
        self.layers = nn.ModuleList(Gains() for _ in range(4))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.prompt
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize(("frozen", "strategy"), list(product([0, 3], [DDP, ZERO])))
def test_children_are_cast_before_a_modules_own_parameters(
    frozen: int, strategy: str, tmp_path: Path
) -> None:
    data: Data = lambda: (torch.randn(4, WIDTH, dtype=torch.bfloat16),)  # noqa: E731
    assert differences(lambda: Prompted(frozen=frozen), data, strategy, tmp_path) == {}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.b(functional.silu(self.a(x)))
        return output


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize(
    ("rows", "nested"), [(12, ["layers.3.b"]), (200, [f"{unit}.b" for unit in UNITS])]
)
def test_what_a_unit_in_a_block_returns_is_no_input_of_the_block(
    rows: int, nested: list[str], tmp_path: Path
) -> None:
    """An int of reshard_after_forward copies shards while a block's call still holds its inputs,
    and nothing else."""
    strategy = f"{FSDP2}, reshard_after_forward = 2"
    data: Data = lambda: (torch.randn(rows, WIDTH),)  # noqa: E731
    assert differences(
        Residuals, data, strategy, tmp_path, units=[*UNITS, *nested], parameters="fp32", ranks=4
    ) == {}


class Pair(nn.Module):
    """Gives two values, of which its caller may keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x)
        return y, y.repeat(1, 40).tanh()


class Calls(nn.Module):
    """A block that calls its unit once or twice, and keeps what `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.own = how, Pair(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        if self.how == "discards":
            return x + self.inner(x)[0]
        if self.how == "twice":
            return x + self.inner(self.inner(x)[0])[0]
        y, z = self.inner(x)
        output: Tensor = self.own(y) if self.how == "keeps" else self.inner(y)[0]
        return output + z[..., :WIDTH]


class Calling(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Calls(how) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


@pytest.mark.parametrize(
    ("how", "parameters"),
    [("discards", "fp32"), ("twice", "bf16"), ("keeps", "fp32"), ("keeps, twice", "bf16")],
)
def test_what_a_unit_gave_back_is_held_until_its_hooks_have_run_and_its_locals_are_not(
    how: str, parameters: str, tmp_path: Path
) -> None:
    strategy = f"{FSDP2}, reshard_after_forward = 2"
    data: Data = lambda: (torch.randn(20, WIDTH),)  # noqa: E731
    units = [*UNITS, "layers.1.inner", "layers.2.inner"]
    assert differences(
        lambda: Calling(how), data, strategy, tmp_path, units=units, parameters=parameters, ranks=4,
    ) == {}
