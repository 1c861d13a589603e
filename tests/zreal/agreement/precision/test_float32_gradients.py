"""Float32 gradients of two-byte parameters, each added to the kept ones by a hook as Megatron's
main_grad: the ledger to the byte, order, numerics."""

from __future__ import annotations

import pytest

import zsim
from tests.support.agreement import inexact
from tests.support.cases.sampling import one_in
from zsim.scenario.scenario import Scenario, parse

MODELS = {
    "mlp": 'family = "mlp", sizes = { dims = [6, 8, 8], hidden = 12, num_classes = 5 }',
    "gpt": 'preset = "gpt-tiny"', "llama": 'preset = "llama-tiny"',
}


def scenario(
    strategy: str, model: str, sync: str, more: str, *, reduce: str = "fp32", replicas: int = 1
) -> Scenario:
    text = f"""
model = {{ {MODELS[model]} }}
batch = {{ micro_batch = 2, sequence_length = {1 if model == "mlp" else 8}, accumulation = 3 }}
cluster = {{ preset = "cpu-gloo", ranks = {2 * replicas} }}
strategy = {{ name = "{strategy}", sync = "{sync}", dp_replicate = {replicas} }}
precision = {{ parameters = "bf16", reduce = "{reduce}" }}
execution = {{ accumulation = "fp32" }}
{more}
"""
    return parse(text.encode(), where="main_grad.toml")


@pytest.mark.parametrize(
    ("strategy", "model", "sync", "more", "reduce", "replicas"),
    one_in(4, [
        (strategy, model, sync, more, reduce, replicas)
        for strategy in ("zero1", "zero2", "zero3")
        for model in MODELS
        for sync in ("every", "last")
        for more in ("", "optimizer = { name = \"adamw\", clip_norm = 0.1 }")
        for reduce in ("fp32", "bf16")
        for replicas in (1, 2)
    ]),
)
def test_a_float32_buffer_of_gradients_is_in_the_ledger_to_the_byte(
    strategy: str, model: str, sync: str, more: str, reduce: str, replicas: int
) -> None:
    case = scenario(strategy, model, sync, more, reduce=reduce, replicas=replicas)
    assert inexact(case) == []


@pytest.mark.parametrize("strategy", [
    "zero2", pytest.param("zero1", marks=pytest.mark.slow),
    pytest.param("zero3", marks=pytest.mark.slow),
])
def test_gradients_added_in_float32_train_as_the_reference_does(strategy: str) -> None:
    comparison = zsim.validate(scenario(strategy, "gpt", "last", ""))
    made = {check.name: check.status for check in comparison.checks}
    assert made["numerics"] == "ok"
    assert "failed" not in {made[name] for name in made if "time" not in name}
