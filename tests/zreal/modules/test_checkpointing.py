"""Activation checkpointing as predicted against torch.utils.checkpoint: every peak to the byte, and
training unchanged."""

from __future__ import annotations

import pytest

from tests.support.agreement import inexact
from tests.support.cases.sampling import one_in
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

FULL, SECOND = 'mode = "full"', 'mode = "full", every = 2'
SAVE = 'mode = "selective", save = ["linear"]'
WHOLE, WHOLE_SAVE = f"{FULL}, early_stop = false", f"{SAVE}, early_stop = false"
SECOND_LINEAR = 'mode = "selective", save = ["attention", "linear"], save_every = 2'
SAVE_BOTH = 'mode = "selective", save = ["attention", "linear"]'
ATTENTION = 'mode = "selective", recompute = ["attention"]'
FP32, BF16 = ("fp32", "fp32"), ("bf16", "fp32")


def scenario(
    form: str, *, model: str = "gpt-tiny", attention: str = "sdpa", strategy: str = "fsdp2",
    precision: tuple[str, str] = FP32,
) -> Scenario:
    kind = "" if "mlp" in model else f', attention = "{attention}"'
    text = f"""
model = {{ preset = "{model}"{kind} }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 8}, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "{strategy}" }}
precision = {{ parameters = "{precision[0]}", reduce = "{precision[1]}" }}
activation_checkpointing = {{ {form} }}
"""
    return parse(text.encode(), where="again.toml")


@pytest.mark.parametrize(
    ("form", "options"),
    one_in(3, [
        (FULL, {}), (FULL, {"attention": "explicit"}), (FULL, {"model": "llama-tiny"}),
        (FULL, {"model": "mlp-tiny"}), (FULL, {"precision": BF16}),
        (WHOLE, {"attention": "explicit"}), (WHOLE, {"model": "llama-tiny", "precision": BF16}),
        (WHOLE_SAVE, {"model": "llama-tiny"}), (WHOLE_SAVE, {}),
        (FULL, {"model": "llama-tiny", "precision": BF16}), (SECOND, {}),
        (SECOND, {"model": "llama-tiny", "strategy": "zero3"}), (SAVE, {}),
        (SAVE, {"model": "llama-tiny"}), (SAVE_BOTH, {}), (SAVE_BOTH, {"precision": BF16}),
        (SECOND_LINEAR, {"model": "llama-tiny"}),
        (SECOND_LINEAR, {"precision": BF16, "strategy": "zero3"}), (ATTENTION, {}),
        (ATTENTION, {"attention": "explicit"}), (ATTENTION, {"model": "llama-tiny"}),
        ('mode = "selective", recompute = ["layer_norm", "gelu"]', {}),
        ('mode = "selective", recompute = ["rotary"]', {"model": "llama-tiny"}),
        *(
            (FULL, {"strategy": name})
            for name in ("ddp", "zero_redundancy", "zero1", "zero2", "zero3")
        ),
    ]),
)
def test_memory_under_checkpointing_is_exact(form: str, options: dict[str, object]) -> None:
    assert inexact(scenario(form, **options)) == []  # type: ignore[arg-type]


def test_recomputation_is_an_op_of_its_own_before_each_blocks_backward_and_stops_early() -> None:
    """Four blocks: four recomputations, each without the block's last product; under fully_shard
    with no all-gather more."""
    again, plain = (
        plan(scenario(form), device="cpu").ranks[0].steady for form in (FULL, 'mode = "none"')
    )
    kinds = [
        (op.kind, op.unit) for op in again
        if op.kind in ("recompute", "backward") and op.micro_batch == 0
    ]
    blocks = [f"blocks.{i}" for i in reversed(range(4))]
    assert kinds == [
        ("backward", "root"),
        *((kind, block) for block in blocks for kind in ("recompute", "backward")),
        ("backward", "root"),
    ]
    forward = next(op for op in again if op.kind == "forward" and op.unit == "blocks.3")
    recompute = next(op for op in again if op.kind == "recompute" and op.unit == "blocks.3")
    # neither mlp.proj, whose inputs are what is needed, nor the residual
    assert recompute.kernels == forward.kernels[:-2]
    assert [op.kind for op in again if op.kind == "all_gather"] == [
        op.kind for op in plain if op.kind == "all_gather"
    ]
