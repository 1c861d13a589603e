"""Modules that change parameters of their own in forward, as weights that are normalized before
they are used. Held to torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.test_user_modules_traced import DDP, FSDP2, HSDP, KEPT, differences
from zreal import torch_private
from zreal.tracing.trace import trace
from zsim.errors import ZsimError

WIDTH = 16
FSDP1 = 'name = "fsdp1", dp_shard = 2, dp_replicate = 1'


class Normed(nn.Module):
    """A linear whose weight's rows have length one: it is written back before it is used, as EDM2
    does."""

    def __init__(self, way: str = "no_grad") -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.randn(WIDTH, WIDTH)), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "data":
            self.weight.data.copy_(functional.normalize(self.weight.data, dim=1))
        elif self.way == "detached":
            self.weight.detach().copy_(functional.normalize(self.weight.detach(), dim=1))
        else:
            with torch.no_grad():
                self.weight.copy_(functional.normalize(self.weight, dim=1))
        return functional.linear(x, functional.normalize(self.weight, dim=1)).relu()


class Layers(nn.Module):
    """Four of them."""

    def __init__(self, way: str = "no_grad") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed(way) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


class Bounded(nn.Module):
    """Tokens whose embeddings are at most so long: looking them up makes them so."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, max_norm=1.0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().pow(2).mean()


MAKES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], str]] = {
    "a weight": (
        Layers, lambda: (torch.randn(6, WIDTH),), "layers.0.weight, which copy_ changes in place"
    ),
    "detached": (
        lambda: Layers("detached"), lambda: (torch.randn(6, WIDTH),),
        "layers.0.weight, which copy_ changes in place",
    ),
    "rows of a table": (
        Bounded, lambda: (torch.randint(0, 50, (2, 6)),),
        "embedding.weight, which embedding_renorm_ changes in place",
    ),
}


@pytest.mark.parametrize(
    ("name", "strategy", "accumulation"),
    one_in(3, product(MAKES, [FSDP2, KEPT, HSDP, DDP], [1, 2])),
)
def test_they_are_traced_to_the_byte(
    name: str, strategy: str, accumulation: int, tmp_path: Path
) -> None:
    make, data, _ = MAKES[name]
    assert differences(
        make, data, strategy, tmp_path, ranks=4 if strategy == HSDP else 2,
        accumulation=accumulation,
    ) == {}


@pytest.mark.parametrize("name", MAKES)
def test_fsdp1_refuses_them_as_torch_does(name: str, tmp_path: Path) -> None:
    make, data, says = MAKES[name]
    with pytest.raises(ZsimError, match=f"changes none of its parameters in forward: .*found "
                                        f"{says}; change its .data, .* or use fsdp2"):
        differences(make, data, FSDP1, tmp_path, ranks=2)
    with torch_private.fake_group(rank=0, world_size=2):
        module = FullyShardedDataParallel(
            make(), device_id=torch.device("cpu"), use_orig_params=True
        )
        with pytest.raises(RuntimeError, match="is a view and its base or another view of its "
                                               "base has been modified inplace"):
            module(*data())


@pytest.mark.parametrize("strategy", [FSDP2, DDP, FSDP1, f"{FSDP1}, use_orig_params = true"])
def test_data_is_changed_under_fsdp1_too(strategy: str, tmp_path: Path) -> None:
    assert differences(
        lambda: Layers("data"), MAKES["a weight"][1], strategy, tmp_path, ranks=2, accumulation=2,
    ) == {}


def test_only_their_traces_have_no_form_for_views() -> None:
    make, data, _ = MAKES["a weight"]
    assert [
        (variant.unit_hooks, variant.lowered)
        for variant in trace(make, data(), units=["layers.0"]).hook_variants
    ] == [("fsdp1_views", ())]
    assert trace(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)), data(),
        units=["0"], loss=torch.sum,
    ).hook_variants == ()
