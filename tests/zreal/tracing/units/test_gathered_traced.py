"""Units that read parameters of others: of those around them, as torch lets them, or of sharded
ones, as it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from tests.zreal.tracing.test_tracing_against_torch import measured_phases, simulated_phases, traced
from tests.zreal.tracing.user_modules import Case
from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import dump, parse
from zsim.ir.mesh import Mesh
from zsim.models.training_options import Dtype
from zsim.strategies import fsdp2

WIDTH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        output: Tensor = self.attention(x, memory, memory, need_weights=False)[0]
        return output


class Latents(nn.Module):
    """Latents of the block's own, which attention in it looks at and looks from, as Perceiver's do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.inner = nn.Parameter(torch.randn(1, 3, WIDTH)), Attention()

    def forward(self, x: Tensor) -> Tensor:
        latents = self.inner(self.latents.expand(x.shape[0], -1, -1), x)
        output: Tensor = x + self.inner(x, latents)
        return output


class Projection(nn.Module):
    """A linear, and a product with a weight that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(self.linear(x), weight) + weight[0]


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inmost, self.linear = Projection(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = self.linear(self.inmost(x, weight)).relu()
        return output


class Weight(nn.Module):
    """Gives a weight of its own to the module in it, and may read it itself after that."""

    def __init__(self, inner: Callable[[], nn.Module], *, again: bool = False) -> None:
        super().__init__()
        self.weight, self.inner, self.again = (
            nn.Parameter(torch.randn(WIDTH, WIDTH)), inner(), again,
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.inner(x, self.weight)
        return output + self.weight[1] if self.again else output


def model(block: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)
    )


def data() -> tuple[Tensor, ...]:
    return (torch.randn(2, 5, WIDTH),)


class Summed(Case):
    def loss(self, output: Tensor) -> Tensor:
        return output.float().sum()


MAKES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "latents": (Latents, ("2.inner", "3.inner")),
    "a weight": (lambda: Weight(Projection), ("1.inner",)),
    "a weight of both": (lambda: Weight(Projection, again=True), ("1.inner", "3.inner")),
    "one in one in one": (lambda: Weight(Middle), ("2.inner.inmost", "2.inner")),
    "one in a plain one": (lambda: Weight(Middle), ("2.inner.inmost",)),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    ("name", "dtype", "reshard"),
    [
        (name, ("float32", "bfloat16")[index % 2], index % 3 == 0)
        for index, name in enumerate(MAKES)
    ],
)
def test_a_unit_reads_parameters_of_the_unit_that_it_lies_in(
    name: str, dtype: Dtype, reshard: bool
) -> None:
    block, inner = MAKES[name]
    case = Summed(lambda: model(block), "", data, num_units=0, more=(*inner, "1", "2", "3"))
    seen = traced(case, dtype=dtype)
    assert parse(dump(seen).encode()) == seen
    simulated = simulated_phases(
        seen, fsdp2.Options(reshard_after_forward=reshard), rank=0, mesh=Mesh(dp_shard=2)
    )
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if dtype == "bfloat16"
        else MixedPrecisionPolicy()
    )
    with torch_private.fake_group(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,))

        def wrap(module: nn.Module) -> nn.Module:
            for part in (*map(module.get_submodule, case.all_units), module):
                fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            return module

        assert simulated == measured_phases(case, wrap)


class Tied(nn.Module):
    """Multiplies by the embedding's weight in the end, without calling the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(tokens)
        for layer in self.layers:
            x = layer(x)
        return (x @ self.shared.weight.t()).sum()


class Beside(nn.Module):
    """Layers, of which the last is called with the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Projection()])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers[1](self.layers[0](x), self.layers[0].weight)
        return output


LAYERS = ["layers.0", "layers.1"]
READ_ELSEWHERE: dict[str, tuple[Callable[[], nn.Module], list[str], tuple[Tensor, ...], str]] = {
    "the root": (
        Tied, ["shared", *LAYERS, "layers.2"], (torch.zeros(2, 5, dtype=torch.int64),),
        "shared.weight: .* unit shared .*root",
    ),
    "another": (Beside, LAYERS, data(), r"layers.0.weight: .* unit layers.0 .*layers.1"),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_whoever_else_reads_them_finds_shards_which_is_said_with_what_to_do(name: str) -> None:
    make, units, given, message = READ_ELSEWHERE[name]
    with pytest.raises(
        UntraceableError, match=rf"^{message} reading it .*leave {units[0]} out of units: "
    ):
        trace(make, given, units=units)
    assert trace(make, given, units=units[1:]).modules
    with torch_private.fake_group(rank=0, world_size=2):
        real, mesh = make(), init_device_mesh("cpu", (2,))
        for part in map(real.get_submodule, units):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        fully_shard(real, mesh=mesh)
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            real(*given)
