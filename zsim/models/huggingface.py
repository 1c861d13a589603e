"""A Hugging Face config.json of the kinds gpt2, llama, mistral and qwen2 as a ModelSpec. It downloads nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zsim.errors import ScenarioError
from zsim.model import ModelSpec
from zsim.models import transformers
from zsim.models.gpt import GptSizes
from zsim.models.llama import LlamaSizes
from zsim.models.transformers import Dropout

MAX_BYTES = 1024 * 1024
MAX_SIZE = 10_000_000
MAX_LAYERS = 4096
NUMBERS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "initializer_range")
DTYPES = ("float32", "bfloat16", "float16")
"""What changes no byte and no FLOP, but what transformers must be able to use where the model is run for real."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose frequencies are made with the model."""


def load(path: str, *, folder: Path | None, sequence_length: int) -> ModelSpec:
    """The model of the config at `path`, relative to the scenario's `folder`; ScenarioError when of no known kind."""
    return from_config(_read((folder or Path()) / path, path), where=path, sequence_length=sequence_length)


def from_config(config: Mapping[str, Any], *, where: str = "config.json", sequence_length: int = 1) -> ModelSpec:
    """The model of a parsed config.json; ScenarioError, naming `where` and the key, when it is none of the known kinds.

    It is the module that transformers makes of the config, operator by operator: names of parameters are its own.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _problem(where, "model_type", f"one of {', '.join(KINDS)}", kind)
    checked = _Config(where, config)
    checked.require_causal(CAUSAL[kind])
    checked.require_usable()
    return KINDS[kind](checked, sequence_length)


def _problem(path: str, key: str, expected: str, found: object) -> ScenarioError:
    return ScenarioError((f"model.huggingface: {path[:200]}: {key}: expected {expected}, found {str(found)[:60]!r}",))


def _read(file: Path, path: str) -> Mapping[str, Any]:
    try:
        if not file.is_file():
            raise ScenarioError((f"model.huggingface: {path[:200]}: no such file, or not a plain one",))
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        config = json.loads(data) if len(data) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ScenarioError((f"model.huggingface: {path[:200]}: expected a config.json: one JSON object of at most 1 MiB",))
    return config


class _Config:
    """The values of one config, each checked as it is asked for."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def size(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A positive whole number; `default` where it is absent or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise _problem(self.path, key, f"a whole number from 1 to {most:,}", value)
        return value

    def require_usable(self) -> None:
        """ScenarioError for a number or a dtype that transformers cannot make the module with."""
        for key in NUMBERS:
            value = self.values.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12):
                raise _problem(self.path, key, "a number above 0", value)
        for key in ("torch_dtype", "dtype"):
            value = self.values.get(key)
            if value is not None and (not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES):
                raise _problem(self.path, key, f"one of {', '.join(DTYPES)}", value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise _problem(self.path, key, "true or false", value)
        return value

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise _problem(self.path, key, "a number from 0 to 1", value)
        return value

    @property
    def text(self) -> str:
        """The whole config as JSON."""
        return json.dumps(dict(self.values), sort_keys=True)

    def refuse(self, key: str) -> None:
        """ScenarioError when the option `key`, which is not modelled, is on."""
        if self.flag(key, False):
            raise _problem(self.path, key, "false, as anything else is not modelled", True)

    def require(self, key: str, known: tuple[str, ...]) -> None:
        """ScenarioError when the word `key` is given and is none of those that the family knows."""
        value = self.values.get(key, known[0])
        if value not in known:
            raise _problem(self.path, key, f"one of {', '.join(known)}", value)

    def refuse_window(self, sequence_length: int) -> None:
        """ScenarioError when attention looks back no farther than a sequence is long: it then has a mask of its own."""
        window = self.size("sliding_window", sequence_length + 1)
        if window <= sequence_length:
            raise _problem(self.path, "sliding_window", f"more than the sequence length, {sequence_length}", window)

    def require_full_attention(self) -> None:
        """ScenarioError where some layer attends in another way than to all positions before."""
        kinds = self.values.get("layer_types") or ["full_attention"]
        if not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}:
            raise _problem(self.path, "layer_types", '"full_attention" alone, as anything else is not modelled', kinds)

    def refuse_rope(self) -> None:
        """ScenarioError for rotary positions that are made anew while a model runs."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
        if kind not in ROPES:
            raise _problem(self.path, "rope_scaling", f"one of {', '.join(ROPES)}", kind)

    def require_causal(self, architecture: str) -> None:
        """ScenarioError for another head than that of causal language models, for experts, and for weights that are quantized."""
        named = self.values.get("architectures")
        if named not in (None, [], [architecture]):
            raise _problem(self.path, "architectures", f'["{architecture}"], the causal language model', named)
        for key in FOREIGN:
            value = self.values.get(key)
            if value not in (None, False):
                raise _problem(self.path, key, "nothing, as it is not modelled", value)

    def refuse_outputs(self) -> None:
        """ScenarioError when the module is to return, and so to hold, more than logits and loss."""
        for key in ("output_hidden_states", "output_attentions"):
            self.refuse(key)


def _gpt2(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse("add_cross_attention")
    config.refuse_outputs()
    config.require("activation_function", ("gelu_new", "gelu", "gelu_pytorch_tanh"))
    sizes = GptSizes(
        num_layers=config.size("n_layer", most=MAX_LAYERS),
        hidden_size=config.size("n_embd"),
        num_heads=config.size("n_head"),
        vocabulary=config.size("vocab_size"),
        max_positions=config.size("n_positions"),
        feed_forward=config.size("n_inner", 4 * config.size("n_embd")),
        tied=config.flag("tie_word_embeddings", True),
        attention="sdpa",
    )
    dropout = Dropout(
        embedding=config.share("embd_pdrop", 0.1) > 0,
        residual=config.share("resid_pdrop", 0.1) > 0,
        attention=config.share("attn_pdrop", 0.1) > 0,
    )
    activation = str(config.values.get("activation_function", "gelu_new"))
    return transformers.gpt2(sizes, activation=activation, config=config.text, dropout=dropout)


def _llama(config: _Config, sequence_length: int, *, name: str = "llama", qkv_bias: bool = False) -> ModelSpec:
    config.require("hidden_act", ("silu", "swish"))
    config.refuse_outputs()
    config.refuse_rope()
    heads = config.size("num_attention_heads")
    sizes = LlamaSizes(
        num_layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=config.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", heads),
        head_dim=config.size("head_dim", 0),
        feed_forward=config.size("intermediate_size"),
        vocabulary=config.size("vocab_size"),
        qkv_bias=qkv_bias or config.flag("attention_bias", False),
        output_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        tied=config.flag("tie_word_embeddings", False),
    )
    if config.share("attention_dropout", 0.0):
        raise _problem(config.path, "attention_dropout", "0, as in all published models of this kind", config.values["attention_dropout"])
    return transformers.llama(sizes, name=name, config=config.text)


def _mistral(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse_window(sequence_length)
    return _llama(config, sequence_length, name="mistral")


def _qwen2(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse("use_sliding_window")
    config.require_full_attention()
    return _llama(config, sequence_length, name="qwen2", qkv_bias=True)


KINDS: dict[str, Callable[[_Config, int], ModelSpec]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
}

CAUSAL = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
"""The module of each kind that is simulated."""

FOREIGN = ("num_local_experts", "num_experts", "n_routed_experts", "quantization_config")
"""What other modules than those are made by: mixtures of experts, and weights of less than two bytes."""
