"""FLOPs that a step needs, by PaLM's convention, and FLOPs that it does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.scenario.flops import hardware_flops, model_flops
from zsim.scenario.scenario import Scenario, parse

LENGTH, LAYERS, HEADS, HEAD_DIM = 8192, 32, 32, 128
ATTENTION = LENGTH * 12 * LAYERS * HEADS * HEAD_DIM * LENGTH
"""FLOPs of attention in llama-3-8b at this length, forward and backward, all scores counted."""


HEAD = 128256 * 4096
"""Weights of the head, and of the embedding, which multiplies nothing."""


def llama(
    more: str = "", *, attention: str = "sdpa", length: int = LENGTH, layers: int = LAYERS
) -> Scenario:
    text = f"""
model = {{ preset = "llama-3-8b", attention = "{attention}", num_layers = {layers} }}
batch = {{ micro_batch = 1, sequence_length = {length} }}
cluster = {{ preset = "dgx-h100", ranks = 8 }}
strategy = {{ name = "fsdp2" }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
{more}
"""
    return parse(text.encode(), where="llama.toml")


def weights(case: Scenario) -> int:
    """Weights that multiply: norms and the input embedding do not."""
    return case.model.num_parameters - 65 * 4096 - HEAD


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_model_flops_are_those_of_palm_whatever_computes_them(attention: str) -> None:
    """6N + 12·L·H·Q·T per token; N without the input embedding, which multiplies nothing. arXiv
    2204.02311, appendix B."""
    case = llama(attention=attention)
    assert model_flops(case) == LENGTH * 6 * weights(case) + ATTENTION


def test_causal_attention_does_seven_of_the_twelve_parts_that_are_counted() -> None:
    """Two products of half the scores in forward and five in backward; PaLM has six of all."""
    explicit, fused = llama(attention="explicit"), llama()
    assert hardware_flops(explicit) == model_flops(explicit)
    assert model_flops(fused) - hardware_flops(fused) == ATTENTION * 5 // 12
    run = zsim.simulate(fused)
    assert run.mfu is not None
    assert run.hfu is not None
    assert run.mfu / run.hfu == pytest.approx(model_flops(fused) / hardware_flops(fused))


def test_recomputation_is_done_and_not_needed() -> None:
    """A block's last product is not run again: it saves nothing, so torch stops before it."""
    plain, again = llama(), llama('activation_checkpointing = { mode = "full" }')
    forward = LENGTH * 2 * (weights(plain) - HEAD) + ATTENTION // 6
    down = LENGTH * 2 * LAYERS * 4096 * 14336
    assert model_flops(again) == model_flops(plain)
    assert hardware_flops(again) - hardware_flops(plain) == forward - down


@pytest.mark.parametrize(("frozen", "gradients", "attention"), [
    ('"*"', 0, 0), ('"wte*", "norm_f*", "blocks.*"', HEAD, 0),
    ('"norm_f*", "blocks.*", "lm_head*"', 0, ATTENTION * 2 // 3),
])
def test_frozen_parts_take_no_gradient_of_their_own(
    frozen: str, gradients: int, attention: int
) -> None:
    """Backward ends above frozen parts. It comes down to the embedding, where that alone is
    trained, without gradients of weights."""
    if frozen == '"*"':
        with pytest.raises(zsim.ScenarioError, match="nothing is left to train"):
            llama(f"frozen = [{frozen}]")
        return
    plain, part = llama(), llama(f"frozen = [{frozen}]")
    forward = LENGTH * 2 * weights(plain) + ATTENTION // 3
    of_inputs = LENGTH * 2 * weights(plain) if attention else 0
    assert model_flops(part) == forward + of_inputs + LENGTH * 2 * gradients + attention


FROZEN = ((), ("wte.*", "blocks.[01].*"), ("blocks.*",), ("wte.*", "blocks.*.attn.*"))


@given(
    length=st.sampled_from([1024, 8192, 65536]), attention=st.sampled_from(["explicit", "sdpa"]),
    mode=st.sampled_from(["none", "full"]), frozen=st.sampled_from(FROZEN),
)
def test_no_device_does_more_than_its_peak_and_no_step_needs_more_than_is_done(
    length: int, attention: str, mode: str, frozen: tuple[str, ...]
) -> None:
    """HFU <= 1 always. MFU <= HFU, but twice that where fused attention is causal."""
    names = ", ".join(f'"{pattern}"' for pattern in frozen)
    case = llama(f"""frozen = [{names}]
activation_checkpointing = {{ mode = "{mode}" }}""", attention=attention, length=length, layers=3)
    run = zsim.simulate(case)
    assert run.mfu is not None
    assert run.hfu is not None
    assert 0 < run.hfu <= 1
    assert 0 < run.mfu <= run.hfu * (1 if attention == "explicit" else 2)

