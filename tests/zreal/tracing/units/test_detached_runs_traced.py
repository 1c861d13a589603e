"""Units of which one run does not go into the loss, as in siamese steps with a detached view.
Each held to torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zreal.tracing.user_steps import DDP, FSDP1, FSDP2, HSDP, KEPT, Exact
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace

WIDTH = 16
UNITS = [f"layers.{index}" for index in range(4)]


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.PReLU(), nn.Linear(2 * WIDTH, WIDTH))


class Siamese(nn.Module):
    """One encoder on several views, of which those that are called "d" are detached."""

    def __init__(self, views: str) -> None:
        super().__init__()
        self.layers, self.first = nn.ModuleList(layer() for _ in range(4)), nn.Linear(WIDTH, WIDTH)
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for index, view in enumerate(self.views):
            y = self.first(x + index)
            for layer in self.layers:
                y = y + layer(y)
            seen.append(y.detach() if view == "d" else y)
        return torch.stack(
            [(a * b).sum() for a, b in zip(seen, [*seen[1:], seen[0]], strict=True)]
        ).sum()


class Interleaved(nn.Module):
    """Units in any order; what those called by a letter make is detached, and what those called "-"
    make is dropped."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            if name == "-":
                self.layers[1](x)
                continue
            y = self.layers[int(name) if name.isdigit() else "abcd".index(name)](x)
            x = x + (y if name.isdigit() else y.detach())
        return x.sum()


MAKES: dict[str, Callable[[], nn.Module]] = {
    **{views: (lambda views=views: Siamese(views)) for views in ("gd", "dg")},
    **{order: (lambda order=order: Interleaved(order)) for order in ("0a1b2c3d", "012-3")},
}
PREFETCH = f"{FSDP2}, forward_prefetch = 1, backward_prefetch = 2"
CASES = [
    *product(MAKES, (FSDP2, DDP)), ("gd", KEPT), ("dg", HSDP), ("0a1b2c3d", PREFETCH),
    ("012-3", KEPT),
]


def inputs() -> tuple[Tensor, ...]:
    return (torch.randn(6, WIDTH),)


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_run_with_nothing_in_the_loss_has_no_backward(
    name: str, strategy: str, exact: Exact
) -> None:
    exact(MAKES[name], inputs, strategy)


def test_nor_has_it_in_two_bytes_and_two_micro_batches(exact: Exact) -> None:
    exact(MAKES["gd"], inputs, FSDP2, parameters="bf16", accumulation=2)


class Around(nn.Module):
    """Uses what a layer in it makes, and of its second run the value alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.outer(self.inner(x)) + self.inner(x * 2).detach()
        return output


def test_in_a_unit_that_goes_on_it_is_refused_with_the_reason_and_traced_as_told() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Around())

    with pytest.raises(
        UntraceableError,
        match=r"1\.inner: .* a run whose output is detached, .*; leave it out of units: it then",
    ):
        trace(make, inputs(), units=["1", "1.inner"])
    assert trace(make, inputs(), units=["1"]).modules


class Detaching(nn.Module):
    """Goes on from the value alone of what it was called with, and maybe adds what it was called
    with."""

    def __init__(self, detaches: bool, *, adds: bool) -> None:
        super().__init__()
        self.linear, self.detaches, self.adds = nn.Linear(WIDTH, WIDTH), detaches, adds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.detach() if self.detaches else x).relu()
        return y + x if self.adds else y


class Local(nn.Module):
    """Layers of which those at `places` are trained on their own inputs' values, as where learning
    is local; the root may add these."""

    def __init__(self, places: str, how: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(
            Detaching(str(index) in places, adds=how == "added") for index in range(4)
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            if self.how == "beside":
                x = x + layer(x)
            elif self.how == "checkpointed":
                x = x + checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(x).pow(2).mean()


LOCAL = [
    ("0", "added", FSDP2), ("13", "beside", HSDP), ("2", "checkpointed", KEPT),
    ("13", "beside", DDP), ("3", "added", FSDP1),
    ("2", "alone", PREFETCH),  # layers before it get no gradient, which DDP and FSDP1 refuse
]


@pytest.mark.parametrize(("places", "how", "strategy"), LOCAL)
def test_a_unit_that_detaches_its_input_is_reduced_when_backward_is_over(
    places: str, how: str, strategy: str, exact: Exact
) -> None:
    """No gradient comes to the hook on its inputs, at which fully_shard would do it before."""
    exact(lambda: Local(places, how), inputs, strategy, accumulation=2)


class Aside(Local):
    """Each layer's output enters the loss beside a residual that goes on without a gradient, so
    that the root works between the units."""

    def forward(self, x: Tensor) -> Tensor:
        x, losses = self.embedding(x).detach(), []
        for layer in self.layers:
            y = layer(x)
            losses.append(self.head(y * y.sin()).pow(2).mean())
            x = (x + y).detach()
        return torch.stack(losses).sum()


def test_the_root_works_on_between_units_whose_end_no_hook_sees(exact: Exact) -> None:
    exact(lambda: Aside("0123", "alone"), inputs, FSDP2)


class Beside(nn.Module):
    """The same as `Aside`, with nothing that the loss does not depend on: FSDP1 ends a unit when
    autograd comes to the split of its views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Detaching(True, adds=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for layer in self.layers:
            y = layer(x)
            losses.append((y * y.sin()).pow(2).mean())
            x = (x + y).detach()
        return torch.stack(losses).sum()


@pytest.mark.parametrize("strategy", [FSDP2, DDP, FSDP1])
def test_and_every_allocation_and_free_comes_in_torchs_order(strategy: str, exact: Exact) -> None:
    exact(Beside, inputs, strategy, order=True)
