"""Steps of GPT-2 124M on one A100 as it becomes faster, beside what a lecture measured.

Source: chapters of "Let's reproduce GPT-2 (124M)", A. Karpathy, June 2024: 16 sequences of 1,024
tokens, AdamW, torch 2.3. No constant was fitted to them.
"""

from __future__ import annotations

from typing import Any

import pytest

import zsim

NARROW = {"parameters": "fp32", "autocast": "bf16"}
WIDE = {"parameters": "fp32"}
COMPILED = {"compile": True}


def band(
    precision: dict[str, Any], execution: dict[str, Any], *, attention: str = "explicit",
    vocabulary: int = 50_257, optimizer: str = "foreach",
) -> tuple[float, float]:
    """The band of a step, in milliseconds."""
    scenario = zsim.Scenario(
        model={"family": "gpt", "sizes": {
            "num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocabulary": vocabulary,
            "feed_forward": 3072, "tied": True, "attention": attention,
        }},
        batch={"micro_batch": 16, "sequence_length": 1024},
        cluster={"preset": "dgx-a100", "ranks": 1}, strategy={"name": "single"},
        precision=precision, optimizer={"name": "adamw", "implementation": optimizer},
        execution=execution,
    )
    low, high = zsim.simulate(scenario).step_time.band
    return float(low) / 1e6, float(high) / 1e6


@pytest.mark.parametrize(("measured", "precision", "execution", "more"), [
    (1000, WIDE, {}, {}),
    (333, WIDE, {"float32_products": "tf32"}, {}),
    (300, NARROW, {}, {}),
    (130, NARROW, COMPILED, {}),
    (96, NARROW, COMPILED, {"attention": "flash"}),
    (93, NARROW, COMPILED, {"attention": "flash", "vocabulary": 50_304}),
    (90, NARROW, COMPILED, {"attention": "flash", "vocabulary": 50_304, "optimizer": "fused"}),
])
def test_each_step_that_was_measured_is_in_its_band(
    measured: float, precision: dict[str, Any], execution: dict[str, Any], more: dict[str, Any]
) -> None:
    low, high = band(precision, execution, **more)
    assert low <= measured <= high
