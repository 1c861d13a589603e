"""Blocks that run several times and several forwards before one backward: order, bytes and memory
as torch has them."""

from __future__ import annotations

import pytest

from tests.support.agreement import inexact
from tests.zreal.agreement.test_event_order import of_program, of_torch
from zsim.scenario.scenario import Scenario, parse

SIZES = "hidden_size = 12, num_heads = 2, vocabulary = 13"


def model_table(family: str, layers: int) -> str:
    own = {
        "mlp": f"dims = {[9] * (layers + 1)}, hidden = 13, num_classes = 3",
        "gpt": f"num_layers = {layers}, {SIZES}",
        "llama": f"num_layers = {layers}, {SIZES}, feed_forward = 23",
    }
    return f'family = "{family}", sizes = {{ {own[family]} }}'


STACK = '{ times = 2, order = "stack" }'


def scenario(
    model: str, options: str, *, uses: object = 1, forwards: int = 1, bf16: bool = False,
    ranks: int = 2, more: str = "", layers: int = 6,
) -> Scenario:
    text = f"""
model = {{ {model_table(model, layers)}, uses = {uses} }}
batch = {{ micro_batch = 2, sequence_length = {1 if model == "mlp" else 5}, forwards = {forwards}{more} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {options} }}
precision = {{ parameters = "{"bf16" if bf16 else "fp32"}", reduce = "fp32" }}
"""  # noqa: E501
    return parse(text.encode(), where="repeats.toml")


@pytest.mark.parametrize(("model", "options", "more"), [
    ("mlp", 'name = "fsdp2"', {"uses": 2}),
    ("gpt", 'name = "fsdp2", reshard_after_forward = true', {"uses": 2, "bf16": True, "layers": 2}),
    ("mlp", 'name = "fsdp2", reshard_after_forward = false', {"uses": STACK, "forwards": 2}),
    ("llama", 'name = "fsdp2"', {"forwards": 2, "bf16": True, "layers": 2}),
    ("mlp", 'name = "fsdp2", sync = "last"',
     {"uses": 2, "bf16": True, "more": ", accumulation = 3"}),
    ("mlp", 'name = "fsdp2", reshard_after_forward = 2',
     {"uses": STACK, "forwards": 2, "ranks": 4}),
    ("mlp", 'name = "hsdp", dp_replicate = 2, sync = "last"',
     {"uses": 2, "ranks": 4, "more": ", accumulation = 2"}),
    ("mlp", 'name = "fsdp2", forward_prefetch = 1, backward_prefetch = 2',
     {"uses": STACK, "forwards": 2}),
    ("gpt", 'name = "ddp"', {"uses": 2, "forwards": 2, "layers": 2}),
    ("mlp", 'name = "zero_redundancy", gradient_as_bucket_view = true',
     {"forwards": 2, "uses": 2, "ranks": 3}),
    ("mlp", 'name = "zero1"', {"uses": 2, "bf16": True}),
    ("mlp", 'name = "zero2", sync = "last"',
     {"uses": 2, "forwards": 2, "more": ", accumulation = 2"}),
    ("mlp", 'name = "zero3"', {"uses": STACK, "forwards": 2}),
])
def test_order_bytes_and_memory_are_exact(
    model: str, options: str, more: dict[str, object]
) -> None:
    assert inexact(scenario(model, options, **more)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "options", "repeated"), [
    ("mlp", 'name = "fsdp2"', {"uses": 3}),
    ("gpt", 'name = "fsdp2", reshard_after_forward = true', {"uses": 2, "forwards": 2}),
    ("llama", 'name = "fsdp2"', {"uses": STACK, "bf16": True}),
    ("llama", 'name = "ddp"', {"forwards": 2}), ("gpt", 'name = "ddp"', {"uses": 2, "bf16": True}),
])
def test_every_allocation_and_free_comes_in_torchs_order(
    model: str, options: str, repeated: dict[str, object]
) -> None:
    case = scenario(model, options, layers=2, **repeated)  # type: ignore[arg-type]
    assert of_program(case) == of_torch(case)
