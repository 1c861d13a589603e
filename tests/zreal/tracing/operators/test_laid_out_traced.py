"""Inputs and gradients of parameters in other layouts than new tensors have, and activations that
are leaves. Each is held to torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.user_steps import DDP, FSDP1, FSDP2, HSDP, Exact
from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import dump, parse

WIDTH = 16


class Patches(nn.Module):
    """Convolutions with a wide one among them, whose weight's gradient lies as its input does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 64, 4, 4), nn.GroupNorm(4, 64), nn.Conv2d(64, 8, 1)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.silu(x).mean()


# torch's kernel for a convolution goes by the number of threads, and with it the strides of the
# weight's gradient: DDP warns of those that its buckets do not have, and copies it all the same
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
@pytest.mark.parametrize("strategy", [DDP, FSDP2, HSDP, FSDP1])
def test_inputs_whose_channels_come_last(strategy: str, exact: Exact) -> None:
    def images() -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),)

    exact(Patches, images, strategy)


def test_parameters_whose_channels_come_last_are_refused_as_fully_shard_refuses_them() -> None:
    module = Patches().to(memory_format=torch.channels_last)
    with pytest.raises(
        UntraceableError,
        match=r"layers\.1\.weight: expected a contiguous parameter, as fully_shard takes alone",
    ):
        trace(module, (torch.randn(2, 3, 8, 8),), units=["layers.0"])


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("bti,oi->bto", x, w),
    "experts": lambda x, w: torch.einsum("bti,eoi->bteo", x, torch.stack((w, w))).mean(2),
    "expanded": lambda x, w: torch.bmm(x, w.t().expand(2, WIDTH, WIDTH)),
    "convolution": lambda x, w: functional.conv1d(x.transpose(1, 2), w[..., None]).transpose(1, 2),
}


class Multiplying(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH)),
        )
        self.bias, self.product = nn.Parameter(torch.zeros(WIDTH)), product

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = (
            x + self.product(functional.silu(self.product(x, self.first)), self.second) + self.bias
        )
        return output


class Stacked(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Multiplying(product) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@pytest.mark.parametrize(
    ("name", "strategy", "accumulation"),
    one_in(3, product(PRODUCTS, [FSDP1, FSDP2, DDP], [1, 2])),
)
def test_gradients_that_lie_otherwise_than_their_parameters(
    name: str, strategy: str, accumulation: int, exact: Exact
) -> None:
    """Autograd copies them when it accumulates them, and under FSDP1 when it comes to the views of
    the flat parameter."""

    def data() -> tuple[Tensor, ...]:
        return (torch.randn(2, 6, WIDTH),)

    exact(lambda: Stacked(PRODUCTS[name]), data, strategy, accumulation=accumulation)


class Adapted(nn.Module):
    """A frozen embedding whose output is made to need a gradient, as transformers'
    enable_input_require_grads does for checkpointing."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2000)
        self.recomputes = recomputes

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).requires_grad_(True)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x.mean(1)).float().pow(2).mean()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("strategy", "parameters"), [(FSDP2, "fp32"), (FSDP2, "bf16"), (HSDP, "fp32"), (DDP, "fp32")]
)
def test_activations_that_are_leaves_live_with_their_gradients_until_the_loss_goes(
    strategy: str, parameters: str, recomputes: bool, exact: Exact
) -> None:
    def ids() -> tuple[Tensor, ...]:
        return (torch.randint(0, 40, (2, 256)),)

    exact(lambda: Adapted(recomputes=recomputes), ids, strategy, parameters=parameters)


class Scaled(torch.autograd.Function):
    """Keeps a tensor of its own on its ctx, where autograd does not know of it."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]  # as torch has it
        ctx.kept = x.sin()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * ctx.kept


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 500)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Scaled.apply(layer(x))
        return self.head(x).sum()


@pytest.mark.parametrize("strategy", [FSDP2, HSDP, DDP, FSDP1])
def test_what_functions_keep_on_their_ctx_lives_until_the_loss_goes(
    strategy: str, exact: Exact
) -> None:
    def data() -> tuple[Tensor, ...]:
        return (torch.randn(64, WIDTH),)

    exact(Keeping, data, strategy, accumulation=2)


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


class Asking(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        if self.weight.sum().item() > 0:
            self.bias = None


def test_constructors_that_draw_truncated_normals_are_traced() -> None:
    x = (torch.randn(2, WIDTH),)
    assert trace(Truncated, x, units=[]) == trace(Truncated(), x, units=[])
    with torch_private.fake_mode(), torch_private.nothing_drawn():
        assert nn.init.trunc_normal_(torch.empty(3)).shape == (3,)
    assert nn.init.trunc_normal_(torch.full((9,), 7.0)).abs().max() <= 2


def test_constructors_that_ask_for_values_are_refused_with_what_helps() -> None:
    with pytest.raises(UntraceableError, match="make the module beforehand, with real tensors, "
                                               "and give it itself$"):
        trace(Asking, (torch.randn(2, WIDTH),), units=[], loss=torch.sum)
    assert trace(Asking(), (torch.randn(2, WIDTH),), units=[], loss=torch.sum).modules


def test_an_input_that_needs_a_gradient_is_refused_as_no_strategy_counts_it() -> None:
    with pytest.raises(
        UntraceableError, match=r"inputs\[0\]: expected an input that needs no gradient"
    ):
        trace(Truncated, (torch.randn(2, WIDTH, requires_grad=True),), units=[])


def test_a_trace_under_autocast_keeps_what_each_form_has_in_autocasts_cache() -> None:
    """The form without hooks numbers its buffers otherwise, where checkpointed layers read a leaf.
    """
    model = trace(
        lambda: Adapted(recomputes=True), (torch.randint(0, 40, (2, 8)),), autocast="bfloat16"
    )
    assert model.hook_variants
    assert parse(dump(model).encode()) == model


class Positioned(nn.Module):
    """Layers that add a learned position to what they take, or to what they make, as it is or
    through a view of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for layer in self.layers:
            layer.position = nn.Parameter(
                torch.randn(*((1, 6, WIDTH) if kind == "whole" else (6, WIDTH)))
            )
        self.kind = kind
        for layer in self.layers:
            layer.register_forward_pre_hook(self.add)

    def add(self, layer: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        position = layer.position
        if self.kind == "times one":
            return (given[0] + (position * 1)[None],)
        return (given[0] + (position[None] if self.kind == "view" else position),)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("strategy", [FSDP2, f'{FSDP2}, sync = "last"', DDP])
@pytest.mark.parametrize(
    ("kind", "samples"),
    [("whole", 1), ("whole", 2), ("view", 2), ("plain", 1), ("plain", 2), ("times one", 1)],
)
def test_positions_that_are_added_to_samples(
    kind: str, samples: int, strategy: str, exact: Exact
) -> None:
    def data() -> tuple[Tensor, ...]:
        return (torch.randn(samples, 6, WIDTH),)

    exact(lambda: Positioned(kind), data, strategy, accumulation=2)


def test_a_gradient_that_is_a_view_of_one_that_goes_on_is_refused_with_what_helps() -> None:
    """torch keeps the view, and its storage lives until both are done with it."""
    with pytest.raises(
        UntraceableError,
        match=r"position: expected a gradient of its own, found a view of one that goes on.*two samples",  # noqa: E501
    ):
        trace(lambda: Positioned("view"), (torch.randn(1, 6, WIDTH),))
