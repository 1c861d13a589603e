"""Times of traced models: those of the built-in families, whose operators were measured on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zsim
from zreal.modules import modules
from zreal.tracing.named_module import trace_named
from zreal.tracing.trace import trace
from zsim.autograd.traced import traced_file
from zsim.engine.costs.op_costs import Costs
from zsim.scenario.plan import planned

AUTOCAST = {"parameters": "fp32", "autocast": "bf16"}
GPT = {
    "num_layers": 2, "hidden_size": 768, "num_heads": 12, "feed_forward": 3072,
    "vocabulary": 50304, "tied": True,
}
LLAMA = {
    "num_layers": 2, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "feed_forward": 8192,
    "vocabulary": 128256, "tied": True,
}


def kernels(scenario: zsim.Scenario) -> tuple[int, int]:
    """The peak of a step in bytes, and nanoseconds of all its kernels."""
    run = zsim.simulate(scenario)
    program, costs = planned(scenario).program, Costs(scenario.cluster, scenario.executed)
    return int(run.peak_memory), sum(costs.compute_ns(op.kernels) for op in program.ranks[0].steady)


@pytest.mark.parametrize(("family", "sizes", "precision", "compiled"), [
    ("gpt", {**GPT, "attention": "sdpa"}, AUTOCAST, False),
    ("gpt", {**GPT, "attention": "sdpa"}, AUTOCAST, True),
    ("gpt", {**GPT, "attention": "explicit"}, {"parameters": "bf16"}, False),
    ("llama", LLAMA, {"parameters": "bf16"}, False),
    ("llama", LLAMA, {"parameters": "bf16"}, True),
])
def test_kernels_of_a_traced_family_take_as_long_as_those_of_the_family(
    family: str, sizes: dict[str, Any], precision: dict[str, str], compiled: bool, tmp_path: Path
) -> None:
    options = {
        "batch": {"micro_batch": 8, "sequence_length": 1024},
        "cluster": {"preset": "dgx-h100", "ranks": 1}, "strategy": {"name": "zero3"},
        "precision": precision, "execution": {"compile": compiled},
    }
    own = zsim.Scenario(model={"family": family, "sizes": sizes}, **options)
    inputs = [((8, 1024), torch.int64)] * 2
    model = trace(
        lambda: modules.empty(own.model, seed=0), inputs, device="cuda", casts_input=False,
        dtype="bfloat16" if "autocast" not in precision else None,
        autocast="bfloat16" if "autocast" in precision else "none",
    )
    traced_file.save(model, tmp_path / "traced.json")
    traced = zsim.Scenario(model={"traced": str(tmp_path / "traced.json")}, **options)
    (peak, took), (peak_of_own, expected) = kernels(traced), kernels(own)
    assert peak == peak_of_own
    assert abs(took / expected - 1) <= 0.03


@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_of_a_config_take_as_long_as_those_of_its_module_traced(
    compiled: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    options = {
        "batch": {"micro_batch": 4, "sequence_length": 2048},
        "cluster": {"preset": "dgx-h100", "ranks": 1}, "strategy": {"name": "zero3"},
        "precision": {"parameters": "bf16"}, "execution": {"compile": compiled},
    }
    models = trace_named(
        f"hf:{config}", ["4x2048"], dtype="bfloat16", device="cuda", recomputed=False
    )
    traced_file.save(models, tmp_path / "traced.json")
    traced = kernels(zsim.Scenario(model={"traced": str(tmp_path / "traced.json")}, **options))
    own = kernels(zsim.Scenario(model={"huggingface": str(config)}, **options))
    assert traced[0] == own[0]
    assert abs(traced[1] / own[1] - 1) <= 0.05  # calls of rotary positions are counted apart
