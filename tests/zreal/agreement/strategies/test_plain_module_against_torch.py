"""A plain module as torch trains it without any wrapper: each byte of each part, and the order of
allocations, on the fake process group.

The matrix of memory scenarios has more of it (tests/support/cases/memory_matrix.py).
"""

from __future__ import annotations

import pytest

from tests.support.agreement import inexact
from tests.zreal.agreement.test_event_order import of_program, of_torchs_steps
from tests.zreal.agreement.test_event_order import scenario as small
from zsim.scenario.scenario import Scenario, parse

PLAIN = 'name = "single"'
GPT = """
model = { preset = "gpt-tiny", num_layers = 3 }
batch = { micro_batch = 2, sequence_length = 16, accumulation = 2 }
cluster = { preset = "cpu-gloo", ranks = 1 }
strategy = { name = "single" }
"""
LLAMA = GPT.replace("gpt-tiny", "llama-tiny")
"""Embedding and head of the gpt are tied, of the llama apart."""
KEPT = 'activation_checkpointing = { mode = "selective", save = ["linear"] }'


def scenario(text: str, *lines: str) -> Scenario:
    return parse("\n".join([text, *lines]).encode(), where="plain.toml")


@pytest.mark.parametrize("case", [
    scenario(GPT), scenario(LLAMA),
    scenario(GPT, 'activation_checkpointing = { mode = "full" }'), scenario(LLAMA, KEPT),
    scenario(GPT, 'precision = { autocast = "bf16" }'),
    scenario(LLAMA, 'precision = { parameters = "bf16", master = false }'),
    scenario(LLAMA, 'precision = { parameters = "bf16" }'),
    *(scenario(GPT, f'optimizer = {{ name = "{name}", implementation = "{how}"{more} }}')
      for name, more in (("adamw", ", clip_norm = 1.0"), ("sgd", ""), ("sgd", ", momentum = 0.9"))
      for how in ("foreach", "for-loop", "fused")),
    scenario(LLAMA, 'frozen = ["wte.*", "blocks.0.*"]'), scenario(GPT, "execution.compile = true"),
    scenario(GPT.replace("layers = 3", 'layers = 3, unused = ["blocks.1"]')),
    scenario(LLAMA, 'offload = { activations = "saved_tensors" }'),
    scenario(LLAMA, 'offload = { activations = "checkpoint_inputs" }',
             'activation_checkpointing = { mode = "full" }'),
])
def test_memory_is_torchs_to_the_byte(case: Scenario) -> None:
    assert inexact(case) == []


@pytest.mark.parametrize(("model", "more"), [
    ("mlp", {}), ("gpt explicit", {"accumulation": 2}), ("llama tied", {"again": "save"}),
    ("llama sdpa", {"again": "full", "autocast": "bf16"}), ("gpt math", {"parameters": "bf16"}),
    ("llama ungrouped", {"frozen": '["wte.*", "*.attn.[qk].*"]', "accumulation": 3}),
])
def test_every_allocation_and_free_comes_in_torchs_order(
    model: str, more: dict[str, object]
) -> None:
    case = small(model, PLAIN, **{"parameters": "fp32", **more}, ranks=1)  # type: ignore[arg-type]
    assert [of_program(case, step=step) for step in (1, 2, 3)] == of_torchs_steps(case)[1:]
