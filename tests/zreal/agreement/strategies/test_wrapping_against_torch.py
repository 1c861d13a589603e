"""Wrapping policies against torch: fully_shard of lists of modules, of embedding and head, of the
whole model alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.agreement import inexact
from tests.support.installed_torch import TORCH
from tests.zreal.agreement.test_event_order import of_program, of_torch
from zreal import torch_private
from zreal.modules import modules
from zsim.models.wrapping import SHARED
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.scenario.scenario import Scenario, parse

MODELS = {
    "mlp": "dims = [5, 9, 14, 7, 21, 3, 12], hidden = 17, num_classes = 5",
    "gpt": "num_layers = 6, hidden_size = 8, num_heads = 2, vocabulary = 29, tied = false",
    "llama": 'num_layers = 6, hidden_size = 8, num_heads = 2, feed_forward = 12, vocabulary = '
             '29, attention = "sdpa"',
}
APART = 'ends = "apart"'
FULL = 'activation_checkpointing = { mode = "full" }'
BF16 = 'precision = { parameters = "bf16", reduce = "fp32" }'


def scenario(
    model: str, wrapping: str, strategy: str = 'name = "fsdp2"', *more: str, ranks: int = 4,
    accumulation: int = 1,
) -> Scenario:
    length = "" if model == "mlp" else ", sequence_length = 4"
    text = f"""
model = {{ family = "{model}", sizes = {{ {MODELS[model]} }} }}
batch = {{ micro_batch = 2{length}, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
wrapping = {{ {wrapping} }}
"""
    return parse("\n".join((text, *more)).encode(), where="wrap.toml")


@pytest.mark.parametrize("case", [
    scenario(
        "mlp", "every = 4", 'name = "fsdp2", reshard_after_forward = true', BF16, accumulation=2
    ),
    scenario(
        "mlp", 'every = "all"', 'name = "fsdp2", reshard_after_forward = true', accumulation=2
    ),
    scenario("mlp", "every = 2", 'name = "fsdp2"', 'frozen = ["blocks.[012].*", "*.bias"]', BF16),
    scenario(
        "mlp", f"every = 6, {APART}", 'name = "fsdp2", reshard_after_forward = 2', accumulation=2,
    ),
    scenario(
        "mlp", "every = 2", 'name = "fsdp2", forward_prefetch = 2, backward_prefetch = 1', FULL
    ),
    scenario(
        "mlp", f"every = 2, {APART}",
        'name = "hsdp", dp_replicate = 2, dp_shard = 2, sync = "last"', accumulation=2,
    ),
    scenario("mlp", f"every = 4, {APART}", 'name = "zero3"', accumulation=2),
    scenario("mlp", f"every = 2, {APART}", 'name = "zero1"', BF16),
    scenario("mlp", 'every = "all"', 'name = "ddp", bucket_cap_mb = 0.001'),
    scenario("gpt", 'nested = ["attn.q", "mlp"]', 'name = "zero3", lookahead = 2', FULL),
    scenario("mlp", 'nested = ["fc1"]', 'name = "zero1", granularity = "900 B"', BF16),
    scenario("gpt", f"every = 4, {APART}", 'name = "fsdp2", forward_prefetch = 1', FULL, BF16),
    scenario("gpt", 'every = "all"', 'name = "fsdp2"', FULL),
    scenario("llama", "every = 3", 'name = "fsdp2", backward_prefetch = 2', BF16),
    scenario(
        "mlp", APART,
        'name = "hsdp", dp_replicate = 2, dp_shard = 2, reshard_after_forward = false',
    ),
])
def test_order_bytes_and_every_phases_memory_are_exact(case: Scenario) -> None:
    assert inexact(case, ranks=(case.world_size - 1,)) == []


@pytest.mark.parametrize(("model", "wrapping", "more"), [
    ("mlp", 'every = "all"', ""), ("mlp", f"every = 4, {APART}", BF16),
    ("gpt", f"every = 4, {APART}", FULL), ("llama", "every = 4", BF16),
])
def test_every_allocation_and_free_comes_in_torchs_order(
    model: str, wrapping: str, more: str
) -> None:
    case = scenario(model, wrapping, 'name = "fsdp2"', more, ranks=2)
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize(
    "wrapping", ["every = 1", "every = 4", f"every = 4, {APART}", 'every = "all"']
)
@pytest.mark.parametrize("model", MODELS)
def test_the_real_model_registers_its_parameters_in_the_order_of_the_units(
    model: str, wrapping: str
) -> None:
    spec = scenario(model, wrapping).model
    units = sorted(spec.units, key=lambda unit: unit.fqn == "root")
    named = [name for name, _ in modules.build(spec, seed=0).named_parameters()]
    assert named == [parameter.fqn for unit in units for parameter in unit.parameters]


class Tied(nn.Module):
    """An embedding and a head of one weight, each in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(8, 4), nn.RMSNorm(4), nn.Linear(4, 8, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.embedding(tokens)))
        return logits


@pytest.mark.skipif(TORCH == "2.11", reason="torch 2.11 does not refuse it")
def test_torch_refuses_a_tied_weight_in_two_groups_in_the_words_that_we_quote() -> None:
    with torch_private.fake_group(rank=0, world_size=2):
        model, mesh = Tied(), init_device_mesh("cpu", (2,))
        for unit in (model.embedding, [model.norm, model.head], model):
            fully_shard(unit, mesh=mesh)
        with pytest.raises(ValueError, match=SHARED):
            model(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_training_is_the_same_however_the_model_is_wrapped(strategy: str) -> None:
    case = scenario("mlp", f"every = 4, {APART}", f'name = "{strategy}"', ranks=2)
    ranks = find("gloo").run(case, options=RunOptions(all_ranks=True)).ranks
    assert max(rank.numerics.largest_relative_difference for rank in ranks if rank.numerics) < 1e-2
