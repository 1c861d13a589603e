"""A unit that a user's module passes by: it owns parameters and is never gathered, traced and
through a file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.zreal.tracing.test_tracing_against_torch import (
    measured_phases,
    sharded,
    simulated_phases,
)
from tests.zreal.tracing.user_modules import Case, tokens
from zreal import torch_private
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import dump, parse
from zsim.ir.mesh import Mesh
from zsim.models.training_options import Dtype
from zsim.strategies import fsdp2
from zsim.strategies.ddp import Options, model_problems


class Skipping(nn.Module):
    """Four layers, of which the third never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index, layer in enumerate(self.layers):
            x = x if index == 2 else layer(x)
        return nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten() % 32)


CASE = Case(Skipping, "layers", lambda: tokens(2, 16), num_units=4)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_fully_shard_never_gathers_it(dtype: Dtype) -> None:
    model = trace(CASE.make, CASE.data(), units=CASE.all_units, dtype=dtype, sums_in_place=False)
    assert model.unused == {"layers.2"}
    assert "layers.2.0.weight" not in model.trained
    assert parse(dump(model).encode()) == model
    simulated = simulated_phases(model, fsdp2.Options(), rank=0, mesh=Mesh(dp_shard=2))
    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated == measured_phases(CASE, sharded(CASE, dtype, 2))


def test_ddp_waits_for_its_gradients_unless_it_is_frozen() -> None:
    model = trace(CASE.make, CASE.data(), units=CASE.all_units)
    assert "DDP waits for a gradient" in next(model_problems(Options(), model, False))

    def frozen() -> nn.Module:
        module = Skipping()
        module.layers[2].requires_grad_(False)
        return module

    assert (
        list(model_problems(Options(), trace(frozen, CASE.data(), units=CASE.all_units), False))
        == []
    )


def test_a_unit_whose_parameters_are_read_without_a_call_of_it_is_refused() -> None:
    class Reading(Skipping):
        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            return super().forward(ids, targets) + self.layers[2][0].weight.sum()

    with pytest.raises(Exception, match=r"layers.2: expected every unit to run in forward"):
        trace(Reading, CASE.data(), units=CASE.all_units)


def test_torch_knows_no_gradient_of_it() -> None:
    module = Skipping()
    module(*CASE.data()).backward()
    assert module.layers[2][0].weight.grad is None
    assert torch.is_tensor(module.layers[3][0].weight.grad)
