"""FLOPs that a lowered step does against those that torch's own counter sees in the same module:
frozen parts, autocast, recomputation."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.support.cases.sampling import one_in
from zreal.modules import modules
from zreal.modules.numerics import batches
from zsim.scenario.flops import hardware_flops, model_flops
from zsim.scenario.scenario import Scenario, parse

GPT = 'preset = "gpt-tiny", attention = "explicit"'
LLAMA = 'preset = "llama-tiny", attention = "explicit"'
MLP = 'family = "mlp", sizes = { dims = [6, 8, 8], hidden = 12, num_classes = 5 }'
FROZEN: dict[str, tuple[str, ...]] = {
    GPT: ("*.bias", "wte.*", "blocks.[01].*", "blocks.*.weight", "blocks.*.attn.q.*", "wpe.*"),
    LLAMA: ("wte.*", "blocks.[01].*", "blocks.*", "norm_f.*", "blocks.*.attn.[kv].*"),
    MLP: ("blocks.0.*", "*.weight", "blocks.1.*", "blocks.*.bias", "head.*"),
}
"""Patterns of parameters that are frozen, by model: alone, and the first two together."""


def scenario(model: str, frozen: tuple[str, ...], more: str, autocast: str) -> Scenario:
    names = ", ".join(f'"{name}"' for name in frozen)
    text = f"""
model = {{ {model} }}
batch = {{ micro_batch = 2, sequence_length = {1 if model is MLP else 8}, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "ddp" }}
precision = {{ autocast = "{autocast}" }}
frozen = [{names}]
{more}
"""
    return parse(text.encode(), where="flops.toml")


def counted(case: Scenario) -> int:
    """FLOPs of one step of the module, by torch's formulas of matrix products."""
    model = modules.build(case.model, seed=0, checkpointing=case.checkpointing)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != (name in case.model.frozen)
    with FlopCounterMode(display=False) as counter:
        for batch in batches.micro_batches(case, rank=0, step=0, dtype="float32"):
            with batches.autocast(case.precision, device="cpu"):
                loss = batches.summed_loss(model, [batch])
            loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    ("model", "frozen", "more", "autocast"),
    one_in(2, [
        (model, frozen, more, autocast)
        for model in (MLP, GPT, LLAMA)
        for frozen in ((), *((pattern,) for pattern in FROZEN[model]), FROZEN[model][:2])
        for more in ("", 'activation_checkpointing = { mode = "full" }')
        for autocast in ("none", "bf16")
    ]),
)
def test_a_step_does_the_flops_that_torch_counts(
    model: str, frozen: tuple[str, ...], more: str, autocast: str
) -> None:
    case = scenario(model, frozen, more, autocast)
    assert hardware_flops(case) == counted(case)
    if not more:
        assert model_flops(case) == hardware_flops(case)
