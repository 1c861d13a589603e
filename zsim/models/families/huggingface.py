"""A Hugging Face config.json of the kinds in KINDS as a ModelSpec. It downloads nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zsim.errors import ScenarioError, listed, shown
from zsim.models.families import transformers
from zsim.models.families.gpt import GptSizes
from zsim.models.families.llama import LlamaSizes
from zsim.models.families.llama_like import llama_like
from zsim.models.families.transformers import Dropout
from zsim.models.spec import ModelSpec

MAX_BYTES = 1024 * 1024
MAX_SIZE = 10_000_000
MAX_LAYERS = 4096
MISSING = object()
"""The value of a key that is not there."""
REMEDY = "`zsim trace hf:config.json` makes a file for model.traced of any other"
NUMBERS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "initializer_range")
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of a config that transformers can load for a real run; they change no byte and no FLOP."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose frequencies are made with the model."""


def load(path: str, *, folder: Path | None, sequence_length: int) -> ModelSpec:
    """The model of the config at `path`, relative to the scenario's `folder`; ScenarioError when of
    no known kind."""
    return from_config(
        _read((folder or Path()) / path, path), where=path, sequence_length=sequence_length
    )


def from_config(
    config: Mapping[str, Any], *, where: str = "config.json", sequence_length: int = 1
) -> ModelSpec:
    """The model of a parsed config.json; ScenarioError, naming `where` and the key, when it is none
    of the known kinds.

    It is the module that transformers makes of the config, operator by operator: names of
    parameters are its own.
    """
    kind = config.get("model_type", MISSING)
    if not isinstance(kind, str) or kind not in KINDS:
        wrong = _problem(where, "model_type", listed(KINDS), kind)
        raise ScenarioError((f"{wrong}; {REMEDY}",))
    checked = _Config(where, config)
    checked.require_causal(CAUSAL[kind])
    checked.require_usable()
    return KINDS[kind](checked, sequence_length)


def _problem(path: str, key: str, expected: str, value: object) -> str:
    """The complaint about a key; `value` is MISSING where the key is missing."""
    problem = (
        f"missing; expected {expected}"
        if value is MISSING
        else f"expected {expected}, found {shown(value)}"
    )
    return f"model.huggingface: {path[:200]}: {key}: {problem}"


def _read(file: Path, path: str) -> Mapping[str, Any]:
    try:
        if not file.is_file():
            problem = "expected a file, found a folder" if file.exists() else "no such file"
            raise ScenarioError((f"model.huggingface: {path[:200]}: {problem}",))
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        config = json.loads(data) if len(data) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ScenarioError((f"model.huggingface: {path[:200]}: expected a config.json: one JSON "
                             f"object of at most 1 MiB",))
    return config


class _Config:
    """The values of one config, each checked as it is asked for; what is wrong is noted, and
    something that fits is given instead."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values
        self.problems: dict[str, str] = {}
        """The first complaint about each key."""

    def wrong(self, key: str, expected: str, value: object) -> None:
        """Note that `key` is not as expected."""
        self.problems.setdefault(key, _problem(self.path, key, expected, value))

    def require_right(self) -> None:
        """ScenarioError with all that was noted, if there is anything."""
        if self.problems:
            raise ScenarioError(tuple(self.problems.values()))

    def size(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A positive whole number; `default` where it is absent or null."""
        value = self.values.get(key, MISSING)
        if value in (None, MISSING) and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            self.wrong(key, f"a whole number from 1 to {most:,}", value)
            return 1
        return value

    def require_heads(
        self, *, heads: str, width: str, shared: str = "", head_dim: str = "", divides: bool = True
    ) -> None:
        """Note heads, by the names of their keys, that do not divide the width, or that their keys
        and values do not divide.

        Rotary positions, which kinds with shared heads have, turn pairs of features. Not `divides`:
        of a width that heads do not divide the rest is left over, as transformers does with kinds
        that do not check it.
        """
        if {heads, width, shared, head_dim} & self.problems.keys():
            return
        number, features, of = (
            self.size(heads), self.size(width), self.size(head_dim, 0) if head_dim else 0,
        )
        common = self.size(shared, number) if shared else number
        if divides and features % number:
            self.wrong(heads, f"a divisor of {width}, {features}", number)
        elif not of and number > features:
            self.wrong(heads, f"at most {width}, {features}", number)
        elif number % common:
            self.wrong(shared, f"a divisor of {heads}, {number}", common)
        elif shared and (of or features // number) % 2:
            key, expected = (
                (head_dim, "an even number")
                if of
                else (heads, f"heads of an even size, as a part of {width}, {features}")
            )
            self.wrong(key, f"{expected}, for rotary positions", of or number)

    def require_usable(self) -> None:
        """Note a number or a dtype that transformers cannot make the module with."""
        for key in NUMBERS:
            value = self.values.get(key)
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < 1e12
            ):
                self.wrong(key, "a number above 0", value)
        for key in ("torch_dtype", "dtype"):
            value = self.values.get(key)
            if value is not None and (
                not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES
            ):
                self.wrong(key, listed(DTYPES), value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.wrong(key, "true or false", value)
            return default
        return value

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            self.wrong(key, "a number from 0 to 1", value)
            return default
        return value

    def require_zero(self, key: str) -> None:
        """Note a share that is not 0, as of a dropout."""
        if self.share(key, 0.0):
            self.wrong(key, "0, as in all published models of this kind", self.values[key])

    @property
    def rotated(self) -> float:
        """The share of a head's features that rotary positions turn."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        named = rope if isinstance(rope, Mapping) else {}
        key = "partial_rotary_factor"
        share = named.get(key, self.values.get(key, 1.0))
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            self.wrong(key, "a number above 0, at most 1", share)
            return 1.0
        return share

    @property
    def text(self) -> str:
        """The whole config as JSON."""
        return json.dumps(dict(self.values), sort_keys=True)

    def refuse(self, key: str) -> None:
        """Note when the option `key`, which is not modelled, is on."""
        if self.flag(key, False):
            self.wrong(key, "false, as anything else is not modelled", True)

    def require(self, key: str, known: tuple[str, ...]) -> None:
        """Note when the word `key` is given and is none of those that the family knows."""
        value = self.values.get(key, known[0])
        if value not in known:
            self.wrong(key, listed(known), value)

    def refuse_window(self, sequence_length: int) -> None:
        """Note when attention looks back no farther than a sequence is long: it then has a mask of
        its own."""
        window = self.size("sliding_window", sequence_length + 1)
        if window <= sequence_length:
            self.wrong(
                "sliding_window", f"more than the sequence length, {sequence_length}", window
            )

    def require_full_attention(self) -> None:
        """Note where some layer attends in another way than to all positions before."""
        kinds = self.values.get("layer_types") or ["full_attention"]
        if not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}:
            self.wrong(
                "layer_types", '"full_attention" alone, as anything else is not modelled', kinds
            )

    def refuse_rope(self) -> None:
        """Note rotary positions that are made anew while a model runs."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = (
            rope.get("rope_type", rope.get("type", "default"))
            if isinstance(rope, Mapping)
            else rope
        )
        if kind not in ROPES:
            self.wrong("rope_scaling", listed(ROPES), kind)

    def require_causal(self, architecture: str) -> None:
        """Note another head than that of causal language models, for experts, and for weights that
        are quantized."""
        named = self.values.get("architectures")
        if named not in (None, [], [architecture]):
            self.wrong("architectures", f'["{architecture}"], the causal language model', named)
        for key in FOREIGN:
            value = self.values.get(key)
            if value not in (None, False):
                self.wrong(key, f"nothing, as it is not modelled ({REMEDY})", value)

    def refuse_outputs(self) -> None:
        """Note when the module is to return, and so to hold, more than logits and loss."""
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
        embedding=config.share("embd_pdrop", 0.1), residual=config.share("resid_pdrop", 0.1),
        attention=config.share("attn_pdrop", 0.1),
    )
    activation = str(config.values.get("activation_function", "gelu_new"))
    config.require_heads(heads="n_head", width="n_embd")
    config.require_right()
    return transformers.gpt2(sizes, activation=activation, config=config.text, dropout=dropout)


def _llama(
    config: _Config, sequence_length: int, *, name: str = "llama", qkv_bias: bool = False,
    head_dim: int = 0, tied: bool = False, activations: tuple[str, ...] = ("silu", "swish"),
) -> ModelSpec:
    config.require("hidden_act", activations)
    config.refuse_outputs()
    config.refuse_rope()
    heads = config.size("num_attention_heads")
    sizes = LlamaSizes(
        num_layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=config.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", None if head_dim else heads),
        head_dim=config.size("head_dim", head_dim),
        feed_forward=config.size("intermediate_size"),
        vocabulary=config.size("vocab_size"),
        qkv_bias=qkv_bias or config.flag("attention_bias", False),
        output_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        tied=config.flag("tie_word_embeddings", tied),
    )
    config.require_zero("attention_dropout")
    keys = {
        "heads": "num_attention_heads", "width": "hidden_size", "shared": "num_key_value_heads",
        "head_dim": "head_dim",
    }
    config.require_heads(**keys, divides=name == "llama")
    rotated = config.rotated if name == "phi3" else 1.0
    config.require_right()
    return llama_like(sizes, name=name, config=config.text, rotated=rotated)


def _mistral(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse_window(sequence_length)
    return _llama(config, sequence_length, name="mistral")


def _qwen2(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse("use_sliding_window")
    config.require_full_attention()
    return _llama(config, sequence_length, name="qwen2", qkv_bias=True)


def _qwen3(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse("use_sliding_window")
    config.require_full_attention()
    return _llama(config, sequence_length, name="qwen3", head_dim=128)


def _gemma(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse("use_bidirectional_attention")
    return _llama(
        config, sequence_length, name="gemma", head_dim=256, tied=True,
        activations=("gelu_pytorch_tanh", "gelu"),
    )


def _phi3(config: _Config, sequence_length: int) -> ModelSpec:
    config.refuse_window(sequence_length)
    for key in ("resid_pdrop", "embd_pdrop"):
        config.require_zero(key)
    return _llama(config, sequence_length, name="phi3")


KINDS: dict[str, Callable[[_Config, int], ModelSpec]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "phi3": _phi3,
}

CAUSAL = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""The module of each kind that is simulated."""

FOREIGN = ("num_local_experts", "num_experts", "n_routed_experts", "quantization_config")
"""Keys of configs whose modules are not simulated: mixtures of experts, quantised weights."""
