"""Autocast of a model: dtypes, casts, and the lifetime of the copies of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.autograd.lowered import LoweredModule
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.lowering.lower_module import lower_each
from zsim.errors import ScenarioError
from zsim.ir.ops import Alloc, Free
from zsim.models.families import gpt, mlp
from zsim.models.families.gpt import GptSizes
from zsim.models.families.mlp import MlpSizes
from zsim.models.training_options import Batch
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

BATCH = Batch(micro_batch=2, sequence_length=8)
SMALL = GptSizes(num_layers=6, hidden_size=8, num_heads=2, vocabulary=11)


def lowered(device: str = "cpu", **sizes: object) -> tuple[LoweredModule, ...]:
    model = gpt.build(replace(SMALL, **sizes), name="gpt", sequence_length=8)  # type: ignore[arg-type]
    return lower(model, batch=BATCH, dtype="float32", device=device, autocast="bfloat16")  # type: ignore[arg-type]


def scenario(precision: str, strategy: str = 'name = "fsdp2"') -> Scenario:
    text = f"""
model = {{ preset = "gpt-tiny" }}
batch = {{ micro_batch = 2, sequence_length = 8 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ {strategy} }}
precision = {{ {precision} }}
"""
    return parse(text.encode(), where="x.toml")


def test_products_run_in_the_narrow_dtype_norms_and_loss_in_float32() -> None:
    dtypes: dict[str, set[str]] = {}
    for module in lowered():
        for kernel in module.forward.kernels:
            dtypes.setdefault(kernel.operator, set()).add(kernel.dtype)
    assert dtypes == {
        "embedding": {"float32"}, "positions": {"float32"}, "layer_norm": {"float32"},
        "cast": {"bfloat16"}, "cast_logits": {"float32"}, "linear": {"bfloat16"},
        "head": {"bfloat16"}, "scores": {"bfloat16"}, "clone": {"bfloat16"},
        "weighted_values": {"bfloat16"}, "scale_scores": {"bfloat16"}, "mask_scores": {"bfloat16"},
        "softmax": {"bfloat16"}, "residual": {"float32"}, "gelu": {"bfloat16"},
        "log_softmax": {"float32"}, "nll_loss": {"float32"},
    }


def test_on_cuda_softmax_is_widened_and_log_softmax_is_not() -> None:
    block, head = (
        {event.buffer: event.nbytes for event in module.forward.memory if isinstance(event, Alloc)}
        for module in (lowered("cuda")[1], lowered("cuda")[-1])
    )
    scores = 2 * 2 * 8 * 8
    assert [block[f"blocks.0:mixed.{part}"] for part in ("scores", "softmax", "probabilities")] == [
        2 * scores, 4 * scores, 2 * scores
    ]
    assert [head[f"head:{value}"] for value in ("logits", "loss.log_softmax", "loss.input")] == [
        16 * 11 * n for n in (2, 2, 4)
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layers", [1, 4, 5, 9])
def test_blocks_traced_once_are_what_tracing_each_gives_under_autocast(
    layers: int, device: str
) -> None:
    blocks = gpt.build(replace(SMALL, num_layers=layers), name="gpt", sequence_length=8)
    even = mlp.build(
        MlpSizes(dims=(8,) * (layers + 1), hidden=6, num_classes=3), name="mlp", sequence_length=1
    )
    for model in (blocks, even):
        options = {"batch": BATCH, "dtype": "float32", "device": device, "autocast": "bfloat16"}
        assert lower(model, **options) == lower_each(model, **options)  # type: ignore[arg-type]


def test_a_weight_that_no_gradient_of_an_input_needs_is_held_by_the_cache_alone() -> None:
    model = mlp.build(
        MlpSizes(dims=(8, 8, 8), hidden=6, num_classes=3), name="mlp", sequence_length=1
    )
    lowered_model = lower(model, batch=Batch(micro_batch=2), dtype="float32", autocast="bfloat16")
    assert {module.fqn: module.freed_with_autocast_cache for module in lowered_model} == {
        "blocks.0": (
            Free("blocks.0:wide.bias"), Free("blocks.0:wide.weight"), Free("blocks.0:y.bias")
        ),
        "blocks.1": (Free("blocks.1:wide.bias"), Free("blocks.1:y.bias")),
        "head": (Free("head:logits.bias"),),
    }


def test_fsdp2_gathers_in_float32_and_keeps_narrow_weights_until_their_backward() -> None:
    steady = (
        plan(scenario('parameters = "fp32", autocast = "bf16"'), device="cpu").of_rank(0).steady
    )
    assert {op.dtype for op in steady if op.kind == "all_gather"} == {"float32"}
    weights = [
        parameter for parameter in scenario("").model.parameters
        if parameter.fqn.endswith("weight") and len(parameter.shape) > 1
    ]
    live: dict[str, int] = {}
    for op in steady:
        if op.kind == "backward":
            break
        for event in op.memory:
            if isinstance(event, Alloc):
                live[event.buffer] = event.nbytes
            else:
                live.pop(event.buffer, None)
    copies = sum(nbytes for buffer, nbytes in live.items() if buffer.endswith(".weight"))
    assert copies == 2 * sum(p.numel for p in weights if not p.fqn.startswith("wpe"))


@pytest.mark.parametrize("parameters", ["bf16", "fp16"])
def test_autocast_over_narrow_parameters_is_refused(parameters: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario(f'parameters = "{parameters}", autocast = "bf16"')
    reason = 'expected only with parameters = "fp32", of which it makes two-byte copies'
    assert refused.value.problems == (f'x.toml: precision.autocast: {reason}, found with '
                                      f'"{parameters}"',)


def test_an_unknown_autocast_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario('autocast = "fp32"')
    assert refused.value.problems == ('x.toml: precision.autocast: expected none, bf16 or '
                                      'fp16, found "fp32"',)
