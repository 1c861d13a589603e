"""Modules that change their own parameters in forward, as weights that are normalized first:
refused, unless it is done to their `.data`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zreal.tracing.user_steps import DDP, FSDP2, Exact
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace

WIDTH = 16


class Normed(nn.Module):
    """A linear whose weight's rows have length one: it is written back before it is used."""

    def __init__(self, *, data: bool) -> None:
        super().__init__()
        self.weight, self.data = nn.Parameter(torch.randn(WIDTH, WIDTH)), data

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.data if self.data else self.weight.detach()
        weight.copy_(functional.normalize(weight, dim=1))
        return functional.linear(x, functional.normalize(self.weight, dim=1)).relu()


class Layers(nn.Module):
    """Four of them."""

    def __init__(self, *, data: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed(data=data) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def rows() -> tuple[Tensor, ...]:
    return (torch.randn(6, WIDTH),)


@pytest.mark.parametrize(("make", "given", "says"), [
    (lambda: Layers(data=False), rows(), r"layers\.0\.weight: .*found copy_ of it in place"),
    (lambda: nn.Sequential(nn.Embedding(50, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 4)),
     (torch.randint(0, 50, (2, 6)),), r"0\.weight: .*found embedding_renorm_ of it in place"),
])
def test_a_change_that_autograd_sees_is_refused_with_what_to_do(
    make: Callable[[], nn.Module], given: tuple[Tensor, ...], says: str
) -> None:
    with pytest.raises(UntraceableError, match=f"^{says}; change its .data"):
        trace(make, given, units=[], loss=torch.sum)


@pytest.mark.parametrize(
    "strategy", [FSDP2, DDP, 'name = "fsdp1", dp_shard = 2, dp_replicate = 1']
)
def test_data_is_changed_to_the_byte(strategy: str, exact: Exact) -> None:
    exact(lambda: Layers(data=True), rows, strategy, accumulation=2)
