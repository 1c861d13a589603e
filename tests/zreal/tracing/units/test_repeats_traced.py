"""Units of a user's module that run several times in a forward: traced, and under torch's own
strategies."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
from torch import Tensor, nn
from torch.nn import functional

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.test_tracing_against_torch import (
    measured_events,
    measured_phases,
    replicated,
    sharded,
    simulated_phases,
    traced,
    traced_events,
)
from tests.zreal.tracing.user_modules import CASES, Case, Encoder
from zreal import torch_private
from zsim.autograd.traced.traced_file import dump, parse
from zsim.ir.mesh import Mesh
from zsim.models.training_options import Dtype
from zsim.strategies import ddp, fsdp2, zero3

Order = Literal["block", "stack"]
NUM_LAYERS = 3


class Shared(Encoder):
    """Every layer runs twice: in a row, or the whole stack of them again."""

    def __init__(self, order: Order) -> None:
        super().__init__(num_layers=NUM_LAYERS)
        self.order = order

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        in_a_row = [layer for layer in self.layers for _ in range(2)]
        for layer in in_a_row if self.order == "block" else [*self.layers, *self.layers]:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Twice(nn.Module):
    """A whole model called twice before one backward, as a scenario's `forwards` has it of the
    families."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Encoder(num_layers=NUM_LAYERS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets) + self.model(tokens.flip(0), targets)
        return loss


TWICE = replace(CASES["encoder"], make=Twice, units="model.layers", num_units=NUM_LAYERS)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_model_that_is_called_twice_before_one_backward_is_traced_and_sharded_as_torch_does(
    dtype: Dtype
) -> None:
    assert traced_events(traced(TWICE, dtype=dtype, casts_input=False)) == measured_events(
        TWICE, dtype=dtype
    )
    simulated = simulated_phases(
        traced(TWICE, dtype=dtype), fsdp2.Options(), rank=0, mesh=Mesh(dp_shard=2)
    )
    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated == measured_phases(TWICE, sharded(TWICE, dtype, 2))


@cache
def case(order: Order) -> Case:
    return replace(CASES["encoder"], make=lambda: Shared(order), num_units=NUM_LAYERS)


def test_each_run_is_a_module_of_its_own_with_the_units_parameters() -> None:
    model = traced(case("stack"), dtype="float32")
    layers = [f"layers.{i}" for i in range(NUM_LAYERS)]
    assert [module.fqn for module in model.modules if module.unit != "root"] == [
        *layers, *(f"{fqn}#2" for fqn in layers)
    ]
    assert [unit.fqn for unit in model.units] == ["root", *layers]
    assert parse(dump(model).encode()) == model


@pytest.mark.parametrize(
    ("order", "dtype"),
    one_in(4, [(o, d) for o in ("stack", "block") for d in ("float32", "bfloat16")]),
)
def test_every_allocation_and_free_of_both_runs_is_traced_in_order(
    order: Order, dtype: Dtype
) -> None:
    assert traced_events(traced(case(order), dtype=dtype, casts_input=False)) == measured_events(
        case(order), dtype=dtype
    )


@pytest.mark.parametrize(
    ("order", "dtype"),
    one_in(4, [(o, d) for o in ("stack", "block") for d in ("bfloat16", "float32")]),
)
def test_fully_shard_gathers_and_holds_what_both_runs_take(order: Order, dtype: Dtype) -> None:
    simulated = simulated_phases(
        traced(case(order), dtype=dtype), fsdp2.Options(), rank=0, mesh=Mesh(dp_shard=2)
    )
    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated == measured_phases(case(order), sharded(case(order), dtype, 2))


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize("order", one_in(2, ["stack", "block"]))
def test_ddp_holds_what_both_runs_take(order: Order) -> None:
    simulated = simulated_phases(
        traced(case(order), dtype="float32"), ddp.Options(), rank=0, mesh=Mesh(dp_replicate=2)
    )
    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated == measured_phases(case(order), replicated())


def test_our_own_strategies_plan_with_both_runs() -> None:
    model = traced(case("stack"), dtype="float32")
    phases = simulated_phases(model, zero3.Options(), rank=0, mesh=Mesh(dp_shard=2))
    assert phases["steady"][0] == phases["steady"][2] > 0
