"""torch.autocast around forward: every phase's bytes and collectives, and the training itself,
against real steps."""

from __future__ import annotations

import pytest
import torch

from tests.support.agreement import inexact
from zreal import torch_private
from zreal.executor.executor import execute
from zreal.modules.numerics import batches
from zreal.modules.numerics.reference import SingleProcess
from zreal.observer.observer import observe
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

FULL = 'activation_checkpointing = { mode = "full" }'
SAVE = 'activation_checkpointing = { mode = "selective", save = ["linear", "attention"] }'


def scenario(
    strategy: str, *, model: str = "gpt-tiny", ranks: int = 2, autocast: str = "bf16",
    more: str = "",
) -> Scenario:
    ranks = 4 if "reshard" in strategy or "hsdp" in strategy else ranks
    text = f"""
model = {{ preset = "{model}"{"" if "mlp" in model else ", num_layers = 2"} }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 8}, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "fp32", reduce = "fp32", autocast = "{autocast}" }}
{more}
"""
    return parse(text.encode(), where="autocast.toml")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ('name = "fsdp2"', {"model": "llama-tiny", "more": FULL}),
        ('name = "zero1", form = "all_reduce"', {"model": "mlp-uneven", "more": FULL}),
    ],
)
def test_autocast_is_exact_in_order_bytes_and_memory(
    strategy: str, options: dict[str, str]
) -> None:
    case = scenario(strategy, **options)
    assert inexact(case) == []


@pytest.mark.parametrize("strategy", ['name = "fsdp2"', 'name = "zero3"'])
def test_observer_executor_and_reference_train_alike_under_autocast(strategy: str) -> None:
    case = scenario(strategy, ranks=1)
    with torch_private.fake_group(rank=0, world_size=1):
        if "fsdp2" in strategy:
            losses = observe(case, rank=0, steps=3).losses
        else:
            losses = execute(case, plan(case, device="cpu"), rank=0, steps=3).losses
    assert tuple(losses) == SingleProcess(case).train(3).losses
    assert (
        tuple(losses)
        != SingleProcess(scenario(strategy, ranks=1, autocast="none")).train(3).losses
    )


def test_autocast_is_left_when_forward_is_over() -> None:
    with batches.autocast(scenario('name = "ddp"').precision, device="cpu"):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
