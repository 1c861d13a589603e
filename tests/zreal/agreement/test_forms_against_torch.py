"""Norms and losses of single calls: order, bytes and memory as torch has them, and the values of
torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.agreement import inexact
from zreal.modules.composites import composite_cross_entropy, composite_norm
from zsim.scenario.scenario import parse

SIZES = (
    "num_layers = 3, hidden_size = 16, num_heads = 4, num_kv_heads = 2, feed_forward = 40, "
    "vocabulary = 300"
)
BOTH = 'norms = "composite", loss = "composite"'


@pytest.mark.parametrize(("strategy", "execution", "dtype", "sizes", "more"), [
    ("ddp", 'norms = "composite"', "fp32", "", ""),
    ("ddp", BOTH, "bf16", ', loss_dtype = "float32"', ""),
    ("ddp", 'loss = "composite"', "bf16", ", tied = true", "batch.forwards = 2"),
    ("fsdp2", BOTH, "bf16", ', loss_dtype = "float32"', ""),
    ("fsdp2", BOTH, "bf16", "", 'activation_checkpointing = { mode = "full" }'),
    ("fsdp2", BOTH, "bf16", "",
     'activation_checkpointing = { mode = "selective", save = ["linear", "attention"] }'),
    ("fsdp2", BOTH, "fp32", "",
     'activation_checkpointing = { mode = "selective", recompute = ["rms_norm"] }'),
    ("fsdp2", BOTH, "bf16", "", 'frozen = ["blocks.*.norm_1.weight", "wte.*"]'),
    ("fsdp2", 'norms = "composite"', "fp32", "", 'precision.autocast = "bf16"'),
    ("zero2", BOTH, "bf16", "", "batch.accumulation = 2"),
])
def test_composite_forms_are_exact(
    strategy: str, execution: str, dtype: str, sizes: str, more: str
) -> None:
    text = f"""
{more}
model.family = "llama"
model.sizes = {{ {SIZES}{sizes} }}
batch.micro_batch = 2
batch.sequence_length = 12
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "{strategy}" }}
precision.parameters = "{dtype}"
precision.reduce = "fp32"
execution = {{ {execution} }}
"""
    assert inexact(parse(text.encode(), where="forms.toml")) == []


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


def test_composite_forms_have_the_values_of_torch_s_own() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    logits, targets = torch.randn(7, 11, requires_grad=True), torch.randint(11, (7,))
    pairs = (
        (composite_norm(x, weight), functional.rms_norm(x, (8,), weight, 1e-6), (x, weight)),
        (composite_cross_entropy(logits, targets), functional.cross_entropy(logits, targets),
         (logits,)),
    )
    for own, theirs, of in pairs:
        torch.testing.assert_close(own, theirs)
        torch.testing.assert_close(
            gradients(own.square().sum(), *of), gradients(theirs.square().sum(), *of)
        )
