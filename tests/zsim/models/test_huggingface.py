"""A Hugging Face config.json as a model: published parameter counts, and messages for what cannot
be used."""

from __future__ import annotations

import json
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.errors import ScenarioError
from zsim.models.families import huggingface
from zsim.scenario import scenario
from zsim.scenario.flops import model_flops

TEXT = """
model = { huggingface = "config.json" }
batch = { micro_batch = 1, sequence_length = 16 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "fsdp2" }
MORE
"""
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
    "n_positions": 1024, "n_inner": None, "attn_pdrop": 0.1,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    "tie_word_embeddings": True, "sliding_window": 8, "use_sliding_window": False,
}


QWEN3: dict[str, Any] = {  # Qwen/Qwen3-0.6B
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GEMMA: dict[str, Any] = {  # google/gemma-2b
    "model_type": "gemma",
    "num_hidden_layers": 18,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 16384,
    "vocab_size": 256000,
    "hidden_act": "gelu",
}
PHI3: dict[str, Any] = {  # microsoft/Phi-3-mini-4k-instruct
    "model_type": "phi3",
    "num_hidden_layers": 32,
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 8192,
    "vocab_size": 32064,
    "sliding_window": 2047,
    "attention_bias": False,
}
KINDS = "gpt2, llama, mistral, qwen2, qwen3, gemma or phi3"


@pytest.mark.parametrize(
    ("config", "expected"),
    [(GPT2, 124_439_808), (LLAMA, 8_030_261_248), (MISTRAL, 7_241_732_096), (QWEN2, 494_032_768),
     (QWEN3, 596_049_920), (GEMMA, 2_506_172_416), (PHI3, 3_821_079_552)],
)
def test_a_hugging_face_config_has_the_published_number_of_parameters(
    config: dict[str, Any], expected: int
) -> None:
    spec = huggingface.from_config(config, sequence_length=128)
    assert (spec.name, spec.num_parameters) == (config["model_type"], expected)


def test_phi3_takes_a_share_of_features_to_turn_and_drops_nothing() -> None:
    half = huggingface.from_config(PHI3 | {"rope_scaling": {"partial_rotary_factor": 0.5}})
    assert half.buffers == (("float32", 96), ("float32", 96))
    for change, key in (
        ({"resid_pdrop": 0.1}, "resid_pdrop"), ({"embd_pdrop": 0.1}, "embd_pdrop"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
    ):
        with pytest.raises(ScenarioError, match=rf"config\.json: {key}: expected "):
            huggingface.from_config(PHI3 | change)


def test_keys_and_values_as_many_as_heads_when_a_config_does_not_say() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    shapes = {
        parameter.fqn: parameter.shape for parameter in huggingface.from_config(config).parameters
    }
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (4096, 4096)


def test_a_head_size_of_its_own_is_taken_from_the_config() -> None:
    shapes = {p.fqn: p.shape for p in huggingface.from_config(LLAMA | {"head_dim": 64}).parameters}
    assert [prod(shapes[f"model.layers.0.self_attn.{part}_proj.weight"]) for part in "qkvo"] == [
        32 * 64 * 4096, 8 * 64 * 4096, 8 * 64 * 4096, 32 * 64 * 4096,
    ]


@pytest.mark.parametrize(("config", "complaint"), [
    ({}, f"model_type: missing; expected {KINDS}; {huggingface.REMEDY}"),
    ({"model_type": []}, f"model_type: expected {KINDS}, found []; {huggingface.REMEDY}"),
    *(
        (
            LLAMA | {"model_type": kind},
            f'model_type: expected {KINDS}, found "{kind}"; {huggingface.REMEDY}',
        )
        for kind in ("bert", "qwen3_moe")
    ),
    (GPT2 | {"n_layer": 10**9},
     "n_layer: expected a whole number from 1 to 4,096, found 1000000000"),
    (GPT2 | {"n_layer": 1.5}, "n_layer: expected a whole number from 1 to 4,096, found 1.5"),
    (GPT2 | {"n_embd": True}, "n_embd: expected a whole number from 1 to 10,000,000, found true"),
    (GPT2 | {"n_head": None}, "n_head: expected a whole number from 1 to 10,000,000, found null"),
    (GPT2 | {"add_cross_attention": True},
     "add_cross_attention: expected false, as anything else is not modelled, found true"),
    (LLAMA | {"hidden_size": -1},
     "hidden_size: expected a whole number from 1 to 10,000,000, found -1"),
    (LLAMA | {"hidden_act": "gelu"}, 'hidden_act: expected silu or swish, found "gelu"'),
    (GPT2 | {"activation_function": "relu"},
     'activation_function: expected gelu_new, gelu or gelu_pytorch_tanh, found "relu"'),
    (GPT2 | {"attn_pdrop": 2}, "attn_pdrop: expected a number from 0 to 1, found 2"),
    (GPT2 | {"resid_pdrop": True}, "resid_pdrop: expected a number from 0 to 1, found true"),
    (LLAMA | {"attention_dropout": 0.1},
     "attention_dropout: expected 0, as in all published models of this kind, found 0.1"),
    (LLAMA | {"attention_bias": 1}, "attention_bias: expected true or false, found 1"),
    (LLAMA | {"tie_word_embeddings": "no"},
     'tie_word_embeddings: expected true or false, found "no"'),
    (MISTRAL | {"sliding_window": 64},
     "sliding_window: expected more than the sequence length, 128, found 64"),
    (MISTRAL | {"sliding_window": 128},
     "sliding_window: expected more than the sequence length, 128, found 128"),
    (QWEN2 | {"use_sliding_window": True},
     "use_sliding_window: expected false, as anything else is not modelled, found true"),
    (QWEN2 | {"layer_types": ["sliding_attention"]},
     'layer_types: expected "full_attention" alone, as anything else is not modelled, '
     'found ["sliding_attention"]'),
    (LLAMA | {"rope_scaling": {"type": "dynamic"}},
     'rope_scaling: expected default, linear, llama3 or yarn, found "dynamic"'),
    (GPT2 | {"output_attentions": True},
     "output_attentions: expected false, as anything else is not modelled, found true"),
])
def test_a_config_that_cannot_be_used_is_refused_with_file_and_key(
    config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        huggingface.from_config(config, where="c.json", sequence_length=128)
    assert caught.value.problems == (f"model.huggingface: c.json: {complaint}",)


@pytest.mark.parametrize(("config", "complaint"), [
    (GPT2 | {"n_head": 5}, "n_head: expected a divisor of n_embd, 768, found 5"),
    (LLAMA | {"num_attention_heads": 5, "head_dim": 64},
     "num_attention_heads: expected a divisor of hidden_size, 4096, found 5"),
    (LLAMA | {"num_attention_heads": 5, "hidden_size": 32},
     "num_attention_heads: expected a divisor of hidden_size, 32, found 5"),
    (LLAMA | {"num_key_value_heads": 5},
     "num_key_value_heads: expected a divisor of num_attention_heads, 32, found 5"),
    (MISTRAL | {"num_attention_heads": 64, "hidden_size": 32},
     "num_attention_heads: expected at most hidden_size, 32, found 64"),
    (LLAMA | {"num_key_value_heads": 64},
     "num_key_value_heads: expected a divisor of num_attention_heads, 32, found 64"),
    (LLAMA | {"head_dim": 7}, "head_dim: expected an even number, for rotary positions, found 7"),
    (LLAMA | {"num_attention_heads": 32, "hidden_size": 96},
     "num_attention_heads: expected heads of an even size, as a part of hidden_size, 96, "
     "for rotary positions, found 32"),
])
def test_heads_of_a_config_that_do_not_fit_are_refused_with_its_file_and_keys(
    config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ScenarioError) as caught:
        huggingface.from_config(config, where="c.json")
    assert caught.value.problems == (f"model.huggingface: c.json: {complaint}",)


@pytest.mark.parametrize("config", [MISTRAL, QWEN2])
def test_heads_of_kinds_that_leave_a_rest_of_the_width_over_have_the_size_of_what_divides(
    config: dict[str, Any]
) -> None:
    spec = huggingface.from_config(
        config | {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 32}
    )
    shapes = {parameter.fqn: parameter.shape for parameter in spec.parameters}
    assert [shapes[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qko"] == [
        (30, 32), (6, 32), (32, 30)
    ]


def test_a_bad_config_has_all_its_problems_listed_in_one_go(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": -1, '
                                          '"hidden_size": "x", "num_hidden_layers": 1e9}')
    text = TEXT.replace("MORE", "seed = true")
    with pytest.raises(ScenarioError) as caught:
        scenario.parse(text.encode(), where="h.toml", folder=tmp_path)
    most = "expected a whole number from 1 to 10,000,000"
    assert set(caught.value.problems) == {
        "h.toml: seed: expected a whole number, found true",
        f"h.toml: model.huggingface: config.json: vocab_size: {most}, found -1",
        f'h.toml: model.huggingface: config.json: hidden_size: {most}, found "x"',
        "h.toml: model.huggingface: config.json: num_hidden_layers: expected a whole number from "
        "1 to 4,096, found 1000000000.0",
        f"h.toml: model.huggingface: config.json: num_attention_heads: missing; {most}",
        f"h.toml: model.huggingface: config.json: intermediate_size: missing; {most}",
    }


@given(
    key=st.sampled_from(sorted(LLAMA)),
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**30), 10**30)
        | st.floats()
        | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        ),
        max_leaves=4,
    ),
)
def test_a_damaged_config_gives_a_model_or_a_message_never_another_error(
    key: str, value: object
) -> None:
    with suppress(ScenarioError):
        assert (
            huggingface.from_config(LLAMA | {"num_hidden_layers": 2, key: value}).num_parameters > 0
        )


def test_a_config_file_is_read_relative_to_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert (
        huggingface.load("config.json", folder=tmp_path, sequence_length=64).num_parameters
        == 124_439_808
    )


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[" * 100_000, '{"n_layer": 1' + "0" * 5000 + "}", " " * 1_100_000, "\xff"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ScenarioError) as caught:
        huggingface.load("config.json", folder=tmp_path, sequence_length=64)
    assert caught.value.problems == ("model.huggingface: config.json: expected a config.json: "
                                     "one JSON object of at most 1 MiB",)


@pytest.mark.parametrize("path", ["none.json", ".", "a\0b"])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ScenarioError, match=r"^model\.huggingface: "):
        huggingface.load(path, folder=tmp_path, sequence_length=64)


def test_biases_of_a_llama_are_where_its_config_says() -> None:
    """q, k, v and o with attention_bias; gate, up and down with mlp_bias."""
    plain = huggingface.from_config(LLAMA, where="c.json", sequence_length=8)
    biased = huggingface.from_config(
        LLAMA | {"attention_bias": True, "mlp_bias": True}, where="c.json", sequence_length=8
    )
    added = {p.fqn for p in biased.parameters} - {p.fqn for p in plain.parameters}
    names = (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
    blocks = [unit.fqn for unit in plain.units if unit.fqn.startswith("model.layers.")]
    assert added == {f"{block}.{name}.bias" for block in blocks for name in names}


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("rms_norm_eps", "x", "a number above 0"), ("rope_theta", True, "a number above 0"),
    ("initializer_range", -1.0, "a number above 0"),
    ("torch_dtype", "x", "float32, bfloat16 or float16"),
    ("dtype", 16, "float32, bfloat16 or float16"),
])
def test_what_transformers_could_not_use_is_refused_before_a_real_run(
    key: str, value: object, expected: str
) -> None:
    with pytest.raises(ScenarioError, match=f"config.json: {key}: expected {expected}, found"):
        huggingface.from_config(LLAMA | {key: value})


@pytest.mark.parametrize(("more", "complaint"), [
    ('precision = { autocast = "bf16" }',
     "precision.autocast: expected none with model.huggingface, found bf16; a family with the same "
     "sizes has it, model.family, and so does a trace: zsim trace hf:config.json --autocast bf16"),
    ('wrapping = { ends = "apart" }',
     "wrapping.ends: expected root with model.huggingface, found apart; a family with the same "
     "sizes has it, model.family"),
    ('activation_checkpointing = { mode = "selective", recompute = ["linear"] }',
     "activation_checkpointing.recompute: expected nothing with model.huggingface, found "
     "linear; a family with the same sizes has it, model.family"),
])
def test_what_modules_of_transformers_are_not_lowered_for_is_refused(
    tmp_path: Path, more: str, complaint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ScenarioError) as caught:
        scenario.parse(TEXT.replace("MORE", more).encode(), where="h.toml", folder=tmp_path)
    assert f"h.toml: {complaint}" in caught.value.problems


@pytest.mark.parametrize(("table", "key"), [
    ("uses = 2", "model.uses"), ('unused = ["model.layers.3"]', "model.unused"),
    ("", "batch.sequence_length"),
])
def test_so_are_other_runs_of_its_blocks_and_a_single_token(
    tmp_path: Path, table: str, key: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = TEXT.replace("MORE", "").replace(
        'config.json"', f'config.json", {table}' if table else 'config.json"'
    )
    text = text if table else text.replace("sequence_length = 16", "sequence_length = 1")
    with pytest.raises(ScenarioError, match=f"h.toml: {key}: expected"):
        scenario.parse(text.encode(), where="h.toml", folder=tmp_path)


@pytest.mark.parametrize(("config", "key"), [
    (LLAMA | {"architectures": ["LlamaModel"]}, "architectures"),
    (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    (GPT2 | {"architectures": ["LlamaForCausalLM"]}, "architectures"),
    (MISTRAL | {"architectures": "MistralForCausalLM"}, "architectures"),
    (MISTRAL | {"num_local_experts": 8}, "num_local_experts"),
    (QWEN2 | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
])
def test_what_is_not_the_causal_language_model_that_is_simulated_is_refused_by_name(
    config: dict[str, Any], key: str
) -> None:
    with pytest.raises(ScenarioError, match=f"config.json: {key}: expected "):
        huggingface.from_config(config, sequence_length=4)


@pytest.mark.parametrize("config", [GPT2, LLAMA, MISTRAL, QWEN2])
def test_the_causal_language_model_of_each_kind_is_taken_by_its_name(
    config: dict[str, Any]
) -> None:
    named = {"architectures": [huggingface.CAUSAL[config["model_type"]]], "num_local_experts": None}
    assert (
        huggingface.from_config(config | named, sequence_length=4).units
        == huggingface.from_config(config, sequence_length=4).units
    )


def test_a_config_needs_the_flops_of_the_preset_of_its_sizes(tmp_path: Path) -> None:
    """GPT-2's linear layers are Conv1D there, which multiply as much."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    text = """
model = { MODEL }
batch = { micro_batch = 1, sequence_length = 128 }
cluster = { preset = "dgx-h100" }
strategy = { name = "fsdp2" }
"""
    models = ('huggingface = "config.json"', 'preset = "gpt-2-124m"')
    cases = [
        scenario.parse(text.replace("MODEL", model).encode(), where="g.toml", folder=tmp_path)
        for model in models
    ]
    assert model_flops(cases[0]) == model_flops(cases[1]) > 0
