"""Units in a block that read what other operators of it read too: their input's gradient goes on to
a sum after their own hooks."""

from __future__ import annotations

import pytest

from tests.zreal.agreement.test_event_order import of_program, of_torch
from tests.zreal.agreement.test_matrix import measured, wrong
from zsim.scenario.plan import training
from zsim.scenario.scenario import parse

TEXT = """
model = {{ preset = "{preset}", num_layers = 3 }}
batch = {{ micro_batch = 2, sequence_length = 8, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{parameters}", reduce = "fp32" }}
wrapping = {{ every = 1, nested = {nested} }}
"""
PROJECTIONS = [
    ("llama-tiny", '["attn.q"]'), ("llama-tiny", '["attn.k", "attn.v"]'),
    ("llama-tiny", '["attn.q", "attn.k", "attn.v"]'), ("llama-tiny", '["mlp.gate"]'),
    ("gpt-tiny", '["attn.k"]'), ("gpt-tiny", '["attn.q", "attn.k", "attn.v"]'),
]
QUICK = ((1, "bf16"), (2, "fp32"), (3, "bf16"), (5, "bf16"))


@pytest.mark.parametrize(("preset", "nested", "parameters"), [
    (*case, dtype) if (index, dtype) in QUICK
    else pytest.param(*case, dtype, marks=pytest.mark.slow)
    for index, case in enumerate(PROJECTIONS)
    for dtype in ("fp32", "bf16")
])
def test_sums_of_gradients_come_after_the_hooks_of_a_unit_that_shares_its_input(
    preset: str, nested: str, parameters: str
) -> None:
    accumulation = 2 if parameters == "bf16" else 1
    text = TEXT.format(
        preset=preset, nested=nested, parameters=parameters, accumulation=accumulation,
        strategy='name = "fsdp2"',
    )
    case = parse(text.encode(), where="shared.toml")
    assert any(module.events_after_hook for module in training(case, device="cpu").modules)
    assert of_program(case) == of_torch(case)
    assert wrong(measured(text)) == []
