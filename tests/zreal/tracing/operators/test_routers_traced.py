"""Functions that routers of experts call, each held to torch; F.one_hot is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zreal.tracing.test_tracing_against_torch import measured_events, traced, traced_events
from tests.zreal.tracing.user_modules import Case
from tests.zreal.tracing.user_steps import DDP, FSDP2, Exact
from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.storage_log import StorageLog
from zreal.tracing.trace import trace

WIDTH, EXPERTS = 16, 64
Use = Callable[[Tensor, Tensor, Tensor], Tensor]


class Router(nn.Module):
    """Four linears and a gate; `use` makes what is added to the loss of the gate's weights, the
    experts chosen and the tokens."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.embedding, self.gate = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.use = use

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        weights = self.gate(x).softmax(-1)
        chosen = weights.topk(2, -1)[1]
        return x.float().mean() + self.use(weights, chosen, tokens)


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """Operators that functional.one_hot runs on real tensors."""
    zeros = index.new_zeros(*index.shape, num_classes)
    return zeros.scatter_(-1, index.unsqueeze(-1), 1)


def balanced(weights: Tensor, chosen: Tensor, _: Tensor) -> Tensor:
    """Loss that grows with how often each expert was chosen, as load balancing asks."""
    share = one_hot(chosen, EXPERTS).sum((0, 1, 2)).float() / chosen.numel()
    return EXPERTS * (share * weights.mean((0, 1))).sum()


ONE_HOT: dict[str, Use] = {
    "by position": lambda w, c, _: (functional.one_hot(c, EXPERTS).sum(2) * w).sum(),
    "by name": lambda w, c, _: (functional.one_hot(input=c, num_classes=EXPERTS).sum(2) * w).sum(),  # type: ignore[call-arg]
    "as an operator": lambda w, c, _: (torch.ops.aten.one_hot(c, EXPERTS).sum(2) * w).sum(),
    "counted": lambda w, _, t: (functional.one_hot(t % 7).sum().float() * w).sum(),
}


def recomputed(weights: Tensor, chosen: Tensor, given: Tensor) -> Tensor:
    balance: Tensor = checkpoint(balanced, weights, chosen, given, use_reentrant=False)
    return balance


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(50, (4, 32)),)


def case(use: Use) -> Case:
    return Case(lambda: Router(use), "layers", fixed, num_units=4)


def fixed() -> tuple[Tensor, ...]:
    return (torch.arange(128).reshape(4, 32) % 50,)


@pytest.mark.parametrize("name", ONE_HOT)
def test_one_hot_is_refused_with_what_to_write_instead(name: str) -> None:
    with pytest.raises(UntraceableError, match=r"^one_hot: expected .*; write what torch runs"):
        trace(lambda: Router(ONE_HOT[name]), tokens())


@pytest.mark.parametrize("use", [balanced, recomputed])
def test_what_torch_runs_for_it_is_traced(use: Use) -> None:
    router = case(use)
    events = traced_events(traced(router, dtype="float32"))
    assert events == measured_events(router, dtype="float32")


@pytest.mark.parametrize("strategy", [FSDP2, DDP])
def test_so_a_step_whose_router_is_its_peak_is_predicted(strategy: str, exact: Exact) -> None:
    exact(lambda: Router(balanced), tokens, strategy)


BESIDE: dict[str, Use] = {
    "places in order": lambda w, c, _: (
        w.flatten(0, 1).repeat(2, 1)[c.flatten().sort(stable=True)[1]].pow(2).sum()
    ),
    "places by argsort": lambda w, c, _: (
        w.flatten(0, 1).repeat(2, 1)[c.flatten().argsort()].pow(2).sum()
    ),
    "capacity": lambda w, c, _: (torch.zeros_like(w).scatter(-1, c, 1.0).cumsum(1) * w).sum(),
    "counted by scatter": lambda w, c, _: (
        torch.zeros(EXPERTS).scatter_add_(0, c.flatten(), w.gather(-1, c).flatten()) * w
    ).sum(),
    "combined": lambda w, c, _: (
        torch.zeros(w.shape[0] * w.shape[1], EXPERTS)
        .index_add_(0, c[..., 0].flatten(), w.flatten(0, 1))
        .pow(2)
        .sum()
    ),
    "reduced": lambda w, c, _: (
        torch.zeros_like(w).scatter_reduce(-1, c, w.gather(-1, c), "mean").pow(2).sum()
    ),
    "largest": lambda w, c, _: w.scatter_reduce(-1, c, w.gather(-1, c), "amax").pow(2).sum(),
    "among some": lambda w, c, _: (
        torch.isin(c, torch.arange(100)).sum(-1, keepdim=True) * w
    ).sum(),
    "sorted in": lambda w, c, _: (
        torch.searchsorted(torch.arange(EXPERTS), c).sum(-1, keepdim=True) * w
    ).sum(),
    "repeated": lambda w, c, _: w.repeat_interleave(2, 0).pow(2).sum(),
    "set": lambda w, c, _: w.masked_fill(w < 0.01, float("-inf")).softmax(-1).pow(2).sum(),
    "each expert": lambda w, c, _: sum(
        ((c == e).any(-1, keepdim=True) * w).pow(2).sum() for e in range(3)
    ),  # type: ignore[return-value, misc]
    "halves that are known": lambda w, _, t: w.sum() * int(t.unbind(1)[3].max()),
}


@pytest.mark.parametrize("name", BESIDE)
def test_functions_of_routers_make_what_torch_makes(name: str) -> None:
    router = case(BESIDE[name])
    events = traced_events(traced(router, dtype="float32"))
    assert events == measured_events(router, dtype="float32")


SHAPES_OF_DATA: dict[str, Use] = {
    "nonzero": lambda w, c, _: w[(c == 1).nonzero()[:, 0]].sum(),
    "index": lambda w, c, _: w[c[..., 0] == 1].sum(),
    "masked_select": lambda w, c, _: w.masked_select(w > 0.1).sum(),
    "_unique2": lambda w, c, _: c.unique().sum() * w.sum(),
    "bincount": lambda w, c, _: (c.flatten().bincount(minlength=EXPERTS) * w).sum(),
    "repeat_interleave": lambda w, c, _: (
        w.flatten(0, 1).repeat_interleave(c[..., 0].flatten(), 0).sum()
    ),
}


@pytest.mark.parametrize("name", SHAPES_OF_DATA)
def test_what_is_as_large_as_data_say_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        UntraceableError,
        match=rf"^aten::{name}.*: expected shapes that follow from those of the inputs",
    ):
        trace(lambda: Router(SHAPES_OF_DATA[name]), tokens())


def test_values_are_known_of_every_result_of_an_operator() -> None:
    with torch_private.fake_mode(), StorageLog():
        least, largest = torch.aminmax(torch.arange(7))
        assert [int(least), int(largest)] == [0, 6]
        first, second = torch.arange(6).view(2, 3).unbind()
        first += 1  # of the memory of both, one part
        assert [int(first[0]), int(second[0])] == [1, 3]
