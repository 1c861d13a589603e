"""Units in units of a user's module: traced, under fully_shard inside out, and through a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.zreal.tracing.steps.test_recomputed_traced import ASKED
from tests.zreal.tracing.test_tracing_against_torch import (
    measured_phases,
    recomputed,
    sharded,
    simulated_phases,
    traced_events,
)
from tests.zreal.tracing.user_modules import CASES, Case
from zreal import torch_private
from zreal.modules.checkpointing import checkpointed_whole
from zreal.tracing.trace import trace
from zsim.autograd.lowered import InnerCall
from zsim.autograd.traced.model import TracedModel
from zsim.autograd.traced.traced_file import dump, parse
from zsim.ir.mesh import Mesh
from zsim.models.training_options import Dtype
from zsim.strategies import fsdp2

INNER = {
    "llama, no cache": ("mlp", "self_attn"), "gpt2": ("mlp", "mlp.c_fc"),
    "encoder": ("linear1", "norm2"), "llama, explicit, tied": ("mlp",),
}


def units(name: str) -> tuple[str, ...]:
    """The case's units with those in them, each after what lies in it."""
    return tuple(
        unit for outer in CASES[name].all_units
        for unit in (*[f"{outer}.{inner}" for inner in INNER[name]][::-1], outer)
    )


@cache
def traced(name: str, *, dtype: Dtype, inner: bool = True, casts_input: bool = True) -> TracedModel:
    case = CASES[name]
    wanted = units(name) if inner else case.all_units
    return trace(
        case.make, case.data(), units=wanted, dtype=dtype, casts_input=casts_input,
        sums_in_place=False,
    )


def wrapper(name: str, dtype: Dtype) -> Callable[[nn.Module], nn.Module]:
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if dtype == "bfloat16"
        else MixedPrecisionPolicy()
    )
    mesh = init_device_mesh("cpu", (2,))

    def wrap(model: nn.Module) -> nn.Module:
        for part in (*map(model.get_submodule, units(name)), model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return model

    return wrap


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(("name", "dtype"), [
    pytest.param("llama, no cache", "bfloat16", marks=pytest.mark.slow),
    pytest.param("gpt2", "float32", marks=pytest.mark.slow), ("encoder", "bfloat16"),
    pytest.param("llama, explicit, tied", "float32", marks=pytest.mark.slow),
])
def test_fully_shard_inside_out_holds_the_bytes_that_the_traced_module_says(
    name: str, dtype: Dtype
) -> None:
    simulated = simulated_phases(
        traced(name, dtype=dtype), fsdp2.Options(), rank=0, mesh=Mesh(dp_shard=2)
    )
    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated == measured_phases(CASES[name], wrapper(name, dtype))


def test_units_in_units_change_no_byte_of_the_module_itself_and_go_through_a_file() -> None:
    name = "encoder"
    nested, plain = (traced(name, dtype="float32", inner=inner) for inner in (True, False))
    assert traced_events(nested) == traced_events(plain)
    assert parse(dump(nested).encode()) == nested
    assert [module.fqn for module in nested.modules][1:6] == [
        "layers.0", "layers.0.linear1", "layers.0@2", "layers.0.norm2", "layers.0@3",
    ]  # fmt: skip
    assert nested.nested
    assert not plain.nested
    assert [unit.fqn for unit in nested.inside_out][:3] == [
        "layers.0.linear1", "layers.0.norm2", "layers.0"
    ]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(("name", "form", "reshard"), [
    ("gpt2", "full", True), ("encoder", "linears kept", False),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("encoder", "full", True), ("encoder", "full", False),
            ("encoder", "every second", "auto"), ("encoder", "linears kept", True),
            ("encoder", "no early stop", True), ("llama, no cache", "linears kept", True),
        )
    ),
])
def test_a_unit_in_a_unit_that_is_recomputed_is_called_once_more(
    name: str, form: str, reshard: bool | Literal["auto"]
) -> None:
    case, asked = CASES[name], ASKED[form]
    model = trace(
        case.make, case.data(), units=units(name), sums_in_place=False, checkpointing=[asked]
    )
    assert parse(dump(model).encode()) == model
    again = recomputed(model, asked)
    assert any(
        isinstance(event, InnerCall) for module in again.lowered for event in module.backward.memory
    )
    simulated = simulated_phases(
        again, fsdp2.Options(reshard_after_forward=reshard), rank=0, mesh=Mesh(dp_shard=2)
    )

    def wrap(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for part in map(module.get_submodule, asked.applies_to(model)):
            part.forward = partial(checkpointed_whole, asked, part.forward)
        for part in (*map(module.get_submodule, units(name)), module):
            fully_shard(
                part, mesh=mesh, reshard_after_forward=None if reshard == "auto" else reshard
            )
        return module

    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated == measured_phases(case, partial(wrap, mesh=init_device_mesh("cpu", (2,))))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(12, 5), nn.Linear(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.up(self.down(x))
        return output


class Passing(nn.Module):
    """Layers of which the first never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](self.layers[1](x))).sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_in_one_that_never_runs_is_wrapped_before_it(world_size: int) -> None:
    inside_out = ("layers.0.up", *(f"layers.{index}" for index in range(4)))
    case = Case(Passing, "", lambda: (torch.randn(4, 12),), num_units=0, more=inside_out)
    model = trace(case.make, case.data(), units=case.all_units, sums_in_place=False)
    order = [unit.fqn for unit in model.inside_out]
    assert order.index("layers.0.up") < order.index("layers.0")
    simulated = simulated_phases(model, fsdp2.Options(), rank=0, mesh=Mesh(dp_shard=world_size))
    with torch_private.fake_group(rank=0, world_size=world_size):
        assert simulated == measured_phases(case, sharded(case, "float32", world_size))
