"""Parameters, gradients and optimizer states all of two bytes, without float32 copies: what torch's
strategies and our executed programs hold and send is exact."""

from __future__ import annotations

import itertools

import pytest

from tests.support.agreement import differences, inexact
from tests.support.cases.sampling import one_in
from zsim.errors import ScenarioError
from zsim.memory.waterfall import state_bytes
from zsim.scenario.scenario import Scenario, parse

OBSERVED = (
    'name = "fsdp2"', 'name = "fsdp2", reshard_after_forward = 2', 'name = "fsdp2", offload = true',
    'name = "hsdp", dp_replicate = 2, dp_shard = 2', 'name = "ddp"',
    'name = "ddp", gradient_as_bucket_view = true', 'name = "zero_redundancy"',
)
EXECUTED = (
    'name = "zero1"', 'name = "zero2"', 'name = "zero3"',
    'name = "zero3", granularity = "parameter"',
)
OPTIMIZERS = (
    'name = "adamw", clip_norm = 1.0', 'name = "sgd", momentum = 0.9, implementation = "for-loop"',
)


def scenario(
    model: str, strategy: str, *, optimizer: str = OPTIMIZERS[0], reduce: str = "bf16",
    precision: str = 'parameters = "bf16", master = false', accumulation: int = 1,
) -> Scenario:
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 16}, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = 4 }}
strategy = {{ {strategy}, sync = "{"every" if accumulation == 1 else "last"}" }}
precision = {{ {precision}, reduce = "{reduce}" }}
optimizer = {{ {optimizer} }}
"""  # noqa: E501
    return parse(text.encode(), where="two_bytes.toml")


MODELS = ("mlp-uneven", "gpt-tiny", "llama-tiny")


@pytest.mark.parametrize(
    ("model", "strategy", "optimizer", "reduce", "accumulation"),
    one_in(11, itertools.product(MODELS, OBSERVED, OPTIMIZERS, ("bf16", "fp32"), (1, 2))),
)
def test_what_torch_holds_and_sends_is_exact(
    model: str, strategy: str, optimizer: str, reduce: str, accumulation: int
) -> None:
    case = scenario(model, strategy, optimizer=optimizer, reduce=reduce, accumulation=accumulation)
    assert differences(case, rank=3) == []


@pytest.mark.parametrize(
    ("model", "strategy", "optimizer", "reduce", "accumulation"),
    one_in(11, itertools.product(MODELS, EXECUTED, OPTIMIZERS, ("bf16", "fp32"), (1, 2))),
)
def test_what_our_programs_hold_and_send_is_exact(
    model: str, strategy: str, optimizer: str, reduce: str, accumulation: int
) -> None:
    case = scenario(model, strategy, optimizer=optimizer, reduce=reduce, accumulation=accumulation)
    assert inexact(case, ranks=(1,), interpreter="executor") == []


@pytest.mark.parametrize("strategy", ['name = "fsdp2"', 'name = "zero3"', 'name = "ddp"'])
def test_they_take_eight_bytes_per_parameter_with_adamw_instead_of_sixteen(strategy: str) -> None:
    pure = state_bytes(scenario("gpt-tiny", strategy))
    mixed = state_bytes(scenario("gpt-tiny", strategy, precision='parameters = "bf16"'))
    assert pure.parameter + pure.gradient + pure.optimizer == 8
    assert mixed.parameter + mixed.gradient + mixed.optimizer == 16


@pytest.mark.parametrize(("strategy", "precision", "complaint"), [
    ('name = "fsdp2"', 'parameters = "fp32", master = false',
     'precision.master: expected true with parameters = "fp32", which are stepped anyway'),
    ('name = "fsdp1", dp_shard = 4, dp_replicate = 1', 'parameters = "bf16", master = false',
     "precision.master: expected true with fsdp1, whose two-byte parameters alone are not "
     "modelled; use fsdp2"),
])
def test_where_there_is_no_such_choice_it_is_refused(
    strategy: str, precision: str, complaint: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario("gpt-tiny", strategy, precision=precision)
    assert caught.value.problems == (f"two_bytes.toml: {complaint}",)
