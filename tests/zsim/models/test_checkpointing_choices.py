"""Operators that a selective policy keeps, and keys of the policy that fit together."""

from __future__ import annotations

import pytest

from zsim.errors import ScenarioError
from zsim.models.checkpointing import Checkpointing
from zsim.models.families import load_preset
from zsim.scenario.scenario import parse

BLOCK = load_preset("llama-tiny", sequence_length=8).modules[1].operators


@pytest.mark.parametrize(("every", "kept"), [
    (1, ["q", "k", "v", "mixed", "a", "gate", "up", "m"]),
    (2, ["q", "v", "mixed", "gate", "m"]), (3, ["q", "mixed", "a", "m"]), (100, ["q", "mixed"]),
])
def test_of_a_blocks_linears_the_first_of_each_few_is_kept_and_attention_is_not_counted(
    every: int, kept: list[str]
) -> None:
    asked = Checkpointing(mode="selective", save=("linear", "attention"), save_every=every)
    assert [operator.output for operator in asked.kept(BLOCK)] == kept


def test_save_every_without_linears_to_count_is_refused() -> None:
    text = """
model = { preset = "llama-tiny" }
batch = { micro_batch = 2, sequence_length = 8 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "fsdp2" }
activation_checkpointing = { mode = "selective", save = ["attention"], save_every = 2 }
"""
    with pytest.raises(ScenarioError) as refused:
        parse(text.encode(), where="x.toml")
    reason = 'expected with "linear" among `save`, which it counts, found 2 without'
    assert refused.value.problems == (f"x.toml: activation_checkpointing.save_every: {reason}",)


@pytest.mark.parametrize(("checkpointing", "keys"), [
    (Checkpointing(), 'mode = "none"'),
    (Checkpointing(mode="full", every=2), 'mode = "full", every = 2'),
    (
        Checkpointing(mode="selective", save=("linear",), early_stop=False),
        'mode = "selective", save = ["linear"], early_stop = false',
    ),
])
def test_a_choice_is_told_by_the_keys_of_a_scenario(
    checkpointing: Checkpointing, keys: str
) -> None:
    assert checkpointing.words == keys
