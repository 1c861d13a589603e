"""Variants of autograd on a traced module's units: with fully_shard's hooks, with none, with
FSDP1's views. Each is held to torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.test_recomputed_traced import ASKED, wrapped
from tests.zreal.tracing.test_tracing_against_torch import (
    measured_events,
    measured_phases,
    recomputed,
    replicated,
    simulated_phases,
    traced_events,
)
from tests.zreal.tracing.test_user_modules_traced import DDP, FSDP2, differences
from tests.zreal.tracing.user_modules import Case
from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zsim.analysis.alternatives import EVERY_BLOCK
from zsim.autograd.traced.model import TracedModel
from zsim.autograd.traced.traced_file import dump, save
from zsim.autograd.traced.traced_file import parse as read
from zsim.errors import ZsimError
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import NO_CHECKPOINTING
from zsim.scenario.scenario import parse
from zsim.strategies import ddp, fsdp1

WIDTH = 24
LENGTH = 4
"""Tokens of a sample: a recurrent layer's operators are traced for each of them."""
FSDP1 = 'name = "fsdp1", dp_shard = 2, dp_replicate = 1'
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


class Recurrent(nn.GRU):
    """A GRU, which keeps a list of its parameters besides."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        output: Tensor = super().forward(x)[0]
        return output


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
    "two runs and a memory": lambda: Decoder(Both, order="01230"),
}


@pytest.mark.parametrize(
    "strategy", [DDP, FSDP2, FSDP1, f'{FSDP1}, sharding = "grad_op", use_orig_params = true']
)
@pytest.mark.parametrize("name", SHARED)
def test_each_strategy_has_the_gradients_that_torch_adds_up_there(
    name: str, strategy: str, tmp_path: Path
) -> None:
    """fully_shard's node hands a unit one tensor for each given, and adds what the unit makes
    before it meets others'."""
    assert differences(SHARED[name], tokens, strategy, tmp_path, ranks=2) == {}


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
@pytest.mark.parametrize("order", ["0123", "01230"])
def test_only_fully_shard_casts_what_units_take(
    order: str, strategy: str, reduce: str, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return Decoder(Positions, given="positions", order=order)

    assert (
        differences(make, tokens, strategy, tmp_path, ranks=2, parameters="bf16", reduce=reduce)
        == {}
    )


ORDERS = ("01230", "01012323", "00123", "0123210")
OPTIONS = (
    "", ', backward_prefetch = "none"', ', backward_prefetch = "post"', ', sharding = "grad_op"',
    ", use_orig_params = true", ", forward_prefetch = true",
)
LAYERS = (Both, OneWeight, Recurrent)
RUNS = [(order, options, layer) for order in ORDERS for options in OPTIONS for layer in LAYERS]


@pytest.mark.parametrize(("order", "options", "layer"), one_in(5, RUNS))
def test_every_run_of_a_unit_under_fsdp1_has_views_of_its_own(
    order: str, options: str, layer: type[nn.Module], tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return Decoder(layer, order=order)

    assert differences(make, tokens, FSDP1 + options, tmp_path, ranks=2) == {}


@pytest.mark.parametrize(("order", "parameters"), [("01230", "bf16"), ("01012323", "fp32")])
def test_so_it_has_when_gradients_wait_for_the_last_micro_batch(
    order: str, parameters: str, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return Decoder(OneWeight, order=order, past=True)

    strategy = f'{FSDP1}, sync = "last"'
    assert differences(
        make, tokens, strategy, tmp_path, ranks=2, parameters=parameters, accumulation=2
    ) == {}


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("form", one_in(2, ["full", "every second"]))
@pytest.mark.parametrize(
    "make", [SHARED["two runs and a memory"], lambda: Decoder(OneWeight, order="01012323")]
)
def test_units_that_are_recomputed_have_it_too(make: Callable[[], nn.Module], form: str) -> None:
    asked = ASKED[form]
    model = recomputed(seen(make, checkpointing=[asked]), asked)
    case = wrapped(Case(make, "", tokens, num_units=0, more=tuple(UNITS)), asked)
    with torch_private.fake_group(rank=0, world_size=2):
        mesh, device = init_device_mesh("cpu", (2,)), torch.device("cpu")

        def wrap(module: nn.Module) -> nn.Module:
            for fqn in UNITS:
                module.set_submodule(
                    fqn,
                    FullyShardedDataParallel(
                        module.get_submodule(fqn), device_mesh=mesh, device_id=device
                    ),
                )
            return FullyShardedDataParallel(module, device_mesh=mesh, device_id=device)

        assert simulated_phases(
            model, fsdp1.Options(), rank=0, mesh=Mesh(dp_shard=2)
        ) == measured_phases(case, wrap)
        assert simulated_phases(
            model, ddp.Options(), rank=0, mesh=Mesh(dp_replicate=2)
        ) == measured_phases(case, replicated())


def test_what_is_the_same_without_hooks_is_kept_once() -> None:
    chain = seen(lambda: Decoder(Recurrent, given=""))
    assert chain.hook_variants == ()
    again = seen(lambda: Decoder(Recurrent, given="", order="01230"), checkpointing=[EVERY_BLOCK])
    assert [(variant.unit_hooks, variant.checkpointing) for variant in again.hook_variants] == [
        ("fsdp1_views", NO_CHECKPOINTING), ("fsdp1_views", EVERY_BLOCK)
    ]
    both = seen(SHARED["two runs and a memory"])
    assert [variant.unit_hooks for variant in both.hook_variants] == ["none", "fsdp1_views"]
    assert read(dump(again).encode()) == again
    assert read(dump(both).encode()) == both


def test_a_module_is_left_with_its_own_parameters_after_runs_with_views() -> None:
    model = Decoder(Recurrent, order="01230")
    before = {fqn: id(parameter) for fqn, parameter in model.named_parameters()}
    flat = [[id(weight) for weight in layer._flat_weights] for layer in model.layers]
    seen(lambda: model)
    trace(model, tokens(), units=UNITS)
    assert {fqn: id(parameter) for fqn, parameter in model.named_parameters()} == before
    assert [[id(weight) for weight in layer._flat_weights] for layer in model.layers] == flat


class Normed(nn.Module):
    """A norm over positions of float32, which torch refuses with weights of two bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, LENGTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.norm(positions).to(x.dtype)


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


def test_a_module_that_only_hooks_make_run_is_refused_by_name_elsewhere(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Decoder(Normed, given="positions")

    save(seen(make, dtype="bfloat16"), tmp_path / "traced.json")
    text = """
model = { traced = "traced.json" }
batch = { micro_batch = 2, sequence_length = 4 }
cluster = { preset = "cpu-gloo", ranks = 2 }
precision = { parameters = "bf16", reduce = "bf16" }
strategy = """
    parse(f"{text} {{ {FSDP2} }}".encode(), where="user.toml", folder=tmp_path)
    for strategy in (DDP, FSDP1, 'name = "zero3"'):
        with pytest.raises(ZsimError, match="itself, as these hooks do, or use fsdp2 or hsdp"):
            parse(f"{text} {{ {strategy} }}".encode(), where="user.toml", folder=tmp_path)
    with pytest.raises(UntraceableError, match="a norm whose weights and buffers are of its "
                                               "input's dtype"):
        seen(make, dtype="bfloat16", casts_input=False)


def test_what_a_unit_takes_and_does_not_use_gets_zeros_from_fully_shard_alone(
    tmp_path: Path
) -> None:
    assert differences(lambda: Unused(True), tokens, FSDP2, tmp_path, ranks=2) == {}
    for strategy in (DDP, FSDP1):
        assert differences(lambda: Unused(False), tokens, strategy, tmp_path, ranks=2) == {}
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
