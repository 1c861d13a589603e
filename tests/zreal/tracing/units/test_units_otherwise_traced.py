"""Variants of autograd on a traced module's units: with fully_shard's hooks and with none. Each is
held to torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from tests.zreal.tracing.steps.test_recomputed_traced import ASKED, wrapped
from tests.zreal.tracing.test_tracing_against_torch import (
    measured_events,
    measured_phases,
    recomputed,
    replicated,
    simulated_phases,
    traced_events,
)
from tests.zreal.tracing.user_modules import Case
from tests.zreal.tracing.user_steps import DDP, FSDP1, FSDP2, Exact, differences
from zreal import torch_private
from zreal.tracing.trace import trace
from zsim.autograd.traced.model import TracedModel
from zsim.autograd.traced.traced_file import dump
from zsim.autograd.traced.traced_file import parse as read
from zsim.errors import ZsimError
from zsim.ir.mesh import Mesh
from zsim.strategies import ddp

WIDTH = 24
LENGTH = 4
"""Tokens of a sample."""
UNITS = [f"layers.{index}" for index in range(4)]


class Attention(nn.Module):
    """nn.MultiheadAttention projects keys and values at once if they are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        output: Tensor = self.attention(x, keys, values, need_weights=False)[0]
        return output


class Both(nn.Module):
    """Reads both of what it is given, and the first twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        output: Tensor = self.first(x) * self.second(memory) + x
        return output


class Alone(nn.Linear):
    """Takes one value, once."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class OneWeight(nn.Module):
    """A weight that it uses twice, and a value that it takes and does not use: fully_shard's node
    then makes zeros for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.eye(WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        output: Tensor = self.norm(x @ self.weight) @ self.weight
        return output


class Positions(nn.Module):
    """Takes positions in float32, whatever the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        output: Tensor = (self.linear(x) * positions).to(x.dtype) + x
        return output


class Decoder(nn.Module):
    """Four layers in the `order` that they run, each of which takes what the one before made, and
    the `given`."""

    def __init__(
        self, layer: type[nn.Module], *, given: str = "memory", order: str = "0123",
        past: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.given, self.order, self.past = given, [int(digit) for digit in order], past

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        x, memory = self.embedding(tokens), self.embedding(others)
        positions = torch.sin(others.float()).unsqueeze(-1) * torch.ones(WIDTH)
        for index in self.order:
            values = {"memory": memory, "itself": x, "positions": positions}
            y = self.layers[index](x, *(values[name] for name in self.given.split()))
            x = x + y if self.past else y
        return x.float().sum()


def tokens() -> tuple[Tensor, ...]:
    return torch.randint(50, (2, LENGTH)), torch.randint(50, (2, LENGTH))


def seen(make: Callable[[], nn.Module], **asked: object) -> TracedModel:
    return trace(make, tokens(), units=UNITS, sums_in_place=False, name="decoder", **asked)  # type: ignore[arg-type]


SHARED: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Decoder(Attention, given="memory memory"),
    "attention over itself": lambda: Decoder(Attention, given="itself itself"),
    "one memory for all": lambda: Decoder(Both),
    "past the unit": lambda: Decoder(Both, given="itself", past=True),
}
TWICE: Callable[[], nn.Module] = lambda: Decoder(Both, order="01230")  # noqa: E731


@pytest.mark.parametrize("strategy", [DDP, FSDP2, FSDP1])
@pytest.mark.parametrize("name", SHARED)
def test_each_strategy_has_the_gradients_that_torch_adds_up_there(
    name: str, strategy: str, exact: Exact
) -> None:
    """fully_shard's node hands a unit one tensor for each given, and adds what the unit makes
    before it meets others'."""
    exact(SHARED[name], tokens, strategy)


@pytest.mark.parametrize("strategy", [DDP, FSDP2])
def test_so_they_are_where_a_unit_runs_twice(strategy: str, exact: Exact) -> None:
    exact(TWICE, tokens, strategy)


def test_units_that_run_twice_have_other_views_under_fsdp1_and_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ZsimError, match="model.traced: expected units that run once with fsdp1"):
        differences(TWICE, tokens, FSDP1, tmp_path, ranks=2)


@pytest.mark.parametrize("name", SHARED)
def test_without_hooks_every_allocation_and_free_is_that_of_the_plain_module_in_order(
    name: str
) -> None:
    model = seen(SHARED[name])
    plain = next(variant.lowered for variant in model.hook_variants if variant.unit_hooks == "none")
    case = Case(SHARED[name], "", tokens, num_units=0, more=tuple(UNITS))
    assert traced_events(replace(model, lowered=plain)) == measured_events(case, dtype="float32")
    assert traced_events(model) != measured_events(case, dtype="float32")


@pytest.mark.parametrize(("strategy", "reduce"), [(DDP, "bf16"), (FSDP2, "fp32"), (FSDP1, "fp32")])
def test_only_fully_shard_casts_what_units_take(strategy: str, reduce: str, exact: Exact) -> None:
    def make() -> nn.Module:
        return Decoder(Positions, given="positions")

    exact(make, tokens, strategy, parameters="bf16", reduce=reduce)


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
def test_units_that_are_recomputed_have_it_too() -> None:
    asked = ASKED["full"]
    model = recomputed(seen(TWICE, checkpointing=[asked]), asked)
    case = wrapped(Case(TWICE, "", tokens, num_units=0, more=tuple(UNITS)), asked)
    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated_phases(
            model, ddp.Options(), rank=0, mesh=Mesh(dp_replicate=2)
        ) == measured_phases(case, replicated())


def test_what_is_the_same_without_hooks_is_kept_once() -> None:
    assert seen(lambda: Decoder(OneWeight, given="itself")).hook_variants
    both = seen(TWICE)
    assert [variant.unit_hooks for variant in both.hook_variants] == ["none"]
    assert read(dump(both).encode()) == both
    assert seen(lambda: Decoder(Alone, given="")).hook_variants == ()


class Unused(nn.Module):
    """One unit takes a value that it does not use; nothing else does, or the loss uses what that is
    made of."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.embedding, self.other = nn.Embedding(50, WIDTH), nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList([OneWeight(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))])
        self.alone = alone

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        other = self.other(others)
        x = self.layers[0](self.embedding(tokens), other * 2)
        for layer in self.layers[1:]:
            x = layer(x)
        return x.sum() if self.alone else x.sum() + other.sum()


def test_what_a_unit_takes_and_does_not_use_gets_zeros_from_fully_shard_alone(exact: Exact) -> None:
    exact(lambda: Unused(True), tokens, FSDP2)
    for strategy in (DDP, FSDP1):
        exact(lambda: Unused(False), tokens, strategy)
    variants = seen(lambda: Unused(True)).hook_variants
    assert [(variant.unit_hooks, variant.lowered) for variant in variants] == [("none", ())]


def test_nodes_of_a_graph_are_numbered_in_the_order_in_which_they_are_made() -> None:
    """Autograd's engine takes nodes from the last to the first; nothing but the order in which they
    were made decides that."""
    before, x = torch_private.next_sequence_number(), torch.ones(2, requires_grad=True)
    first = x * 2
    second = x + 1
    total = (first * second).sum()
    nodes: list[Node] = [
        tensor.grad_fn for tensor in (first, second, total) if tensor.grad_fn is not None
    ]
    assert [torch_private.sequence_number(node) - before for node in nodes] == [0, 1, 3]
    seen: list[int] = []
    for index, node in enumerate(nodes):
        node.register_prehook(lambda _, index=index: seen.append(index))  # type: ignore[misc]
    total.backward()
    assert seen == [2, 1, 0]
