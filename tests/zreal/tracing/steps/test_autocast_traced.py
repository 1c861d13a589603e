"""A user's module under torch.autocast: traced, under fully_shard and DDP, and through a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zreal.tracing.test_trace import family, records
from tests.zreal.tracing.test_tracing_against_torch import (
    measured_phases,
    sharded,
    simulated_phases,
)
from tests.zreal.tracing.user_modules import CASES, Case
from zreal import torch_private
from zreal.modules import modules
from zreal.modules.numerics import batches
from zreal.tracing.trace import trace
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.traced.model import TracedModel
from zsim.autograd.traced.traced_file import dump, parse
from zsim.errors import ZsimError
from zsim.ir.mesh import Mesh
from zsim.strategies import fsdp2


class Casting(Case):
    """A case that is run under autocast."""

    def run(self, model: nn.Module, given: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().run(model, given)


def casting(name: str) -> Casting:
    case = CASES[name]
    return Casting(case.make, case.units, case.data, num_units=case.num_units, more=case.more)


def traced(case: Case) -> TracedModel:
    return trace(
        case.make, case.data(), units=case.all_units, autocast="bfloat16", sums_in_place=False
    )


@pytest.mark.parametrize("name", [
    "encoder", "convolutions", "convolutions, cast", pytest.param("gpt2", marks=pytest.mark.slow),
    pytest.param("llama", marks=pytest.mark.slow),
    pytest.param("encoder, checkpointed", marks=pytest.mark.slow),
    pytest.param("encoder, tied, logits largest", marks=pytest.mark.slow),
])
def test_fully_shard_holds_the_bytes_that_the_module_traced_under_autocast_says(name: str) -> None:
    case = casting(name)
    model = traced(case)
    assert bool(model.lowered[-1].freed_with_autocast_cache) is (
        "llama" not in name
    )  # whose weights are all saved, and it has no biases
    assert parse(dump(model).encode()) == model
    simulated = simulated_phases(model, fsdp2.Options(), rank=0, mesh=Mesh(dp_shard=2))
    with torch_private.fake_group(rank=0, world_size=2):
        assert simulated == measured_phases(case, sharded(case, "float32", 2))


def test_a_trace_is_of_one_autocast() -> None:
    case = CASES["encoder"]
    model = trace(case.make, case.data(), units=case.all_units)
    with pytest.raises(ZsimError, match="expected autocast none, at which it was traced, found "
                                        "bfloat16"):
        lower(model, batch=model.batch, dtype="float32", autocast="bfloat16")


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
@pytest.mark.parametrize(("name", "attention"), [
    ("gpt-tiny", "sdpa"), ("gpt-tiny", "explicit"), ("llama-tiny", "sdpa"), ("mlp-tiny", None),
])
def test_traced_under_cuda_s_autocast_it_peaks_where_the_family_does_there(
    name: str, attention: str | None, strategy: str
) -> None:
    """The family's casts were read from torch's header apart from the tracer's."""
    spec, batch = family(name, attention)
    data = batches.inputs(spec, batch, seed=0, rank=0, step=0, micro_batch=0)
    model = trace(
        modules.build(spec, seed=0), data, autocast="bfloat16", casts_input=False,
        sums_in_place=False, device="cuda",
    )
    assert model.devices == ("cuda",)
    expected = records(
        spec, batch, name=strategy, dtype="float32", device="cuda", autocast="bfloat16"
    )
    assert expected == records(
        model, batch, name=strategy, dtype="float32", device="cuda", autocast="bfloat16"
    )
