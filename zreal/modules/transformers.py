"""The modules of transformers themselves, made of a config.json: what a scenario with
`model.huggingface` really trains.

They train as transformers' own Trainer trains them: in training mode, with labels (the tokens,
which the module shifts) and without a cache of keys and values. The whole module is called as it
is; `run` is for the executor alone, which enters modules one by one, and says line by line what the
forwards of the two inner models do.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zreal.modules.checkpointing import recomputed
from zreal.modules.initial_values import DTYPES, ModelError, initial
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.families.transformers import EMBED, HEAD, TransformersModel
from zsim.models.spec import Module


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Locals of the inner model's forward: the `tokens`, `values` that nobody asks again, and what
    it hands to each block."""

    tokens: Tensor
    values: tuple[Tensor, ...]
    norm: str
    for_blocks: Mapping[str, Any]


class Trained(nn.Module):
    """What is laid over a class of transformers: it takes tokens and gives the loss, and tells its
    parts by the names of the spec."""

    spec: TransformersModel
    _enter: Callable[[Tensor], tuple[Tensor, _Held]]
    """What the inner model's forward does before its blocks, a function of this file."""
    _held: _Held
    """What it holds while they run."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens `x`; `targets` are not asked, as the module makes its own of the
        tokens."""
        _seed(x)
        given: Any = super()
        return cast(Tensor, given.forward(input_ids=x, labels=x, use_cache=False).loss)

    def parameter(self, fqn: str) -> Tensor | None:
        """The parameter called `fqn`, None for ""."""
        return self.get_parameter(fqn) if fqn else None

    def stretch(self, fqn: str) -> nn.Module:
        """The real module of the spec's module `fqn`, which is not the root's own."""
        return self.get_submodule(fqn)

    def run(self, module: Module, x: Tensor, targets: Tensor) -> Tensor:
        """One of the modules of `spec`: a block, or what the root does before and after them."""
        if module.fqn == EMBED:
            _seed(x)
            x, self._held = self._enter(x)
            return x
        if module.fqn != HEAD:
            return cast(Tensor, self.stretch(module.path)(x, **self._held.for_blocks))
        tokens = self._held.tokens
        x = self.get_submodule(self._held.norm)(x)
        del self._held
        logits = self.get_submodule("lm_head")(x)
        given: Any = self
        return cast(
            Tensor, given.loss_function(logits=logits, labels=tokens, vocab_size=logits.shape[-1])
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Buffers keep their dtype, as they do when transformers loads a model in two bytes."""
        given = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in list(self.named_buffers()):
            if buffer.dtype != given[name].dtype:
                path, _, last = name.rpartition(".")
                setattr(self.get_submodule(path), last, given[name].to(buffer.device))
        return self


def _enter_llama(model: Trained, tokens: Tensor) -> tuple[Tensor, _Held]:
    """LlamaModel.forward up to its blocks, and that of the models made after it."""
    inner: Any = model.get_submodule("model")
    embeddings = inner.embed_tokens(tokens)
    places = _places(embeddings)
    _mask(model, embeddings, places)
    tables = inner.rotary_emb(embeddings, position_ids=places)
    kept = {
        "attention_mask": None, "position_embeddings": tables, "position_ids": places,
        "past_key_values": None,
    }
    return embeddings, _Held(
        tokens=tokens, values=(embeddings,), norm="model.norm", for_blocks=kept
    )


def _enter_gpt2(model: Trained, tokens: Tensor) -> tuple[Tensor, _Held]:
    """GPT2Model.forward up to its blocks."""
    inner: Any = model.get_submodule("transformer")
    embeddings = inner.wte(tokens)
    places = _places(embeddings)
    rows = inner.wpe(places)
    x = embeddings + rows
    _mask(model, embeddings, places)
    x = inner.drop(x)
    return x, _Held(
        tokens=tokens, values=(embeddings, rows), norm="transformer.ln_f",
        for_blocks={"position_ids": places},
    )


def _seed(tokens: Tensor) -> None:
    """Begin the random numbers of a forward anew, by its tokens alone: so that dropout is the same
    on a rank and in the reference."""
    torch.manual_seed(zlib.crc32(tokens.cpu().numpy().tobytes()))


def _places(embeddings: Tensor) -> Tensor:
    """The places of tokens, none of which have been seen before."""
    return (torch.arange(embeddings.shape[1], device=embeddings.device) + 0).unsqueeze(0)


def _mask(model: Any, embeddings: Tensor, places: Tensor) -> None:
    """Look whether sequences are packed, for which alone there would be a mask."""
    from transformers import masking_utils  # an extra

    masking_utils.create_causal_mask(
        config=model.config, inputs_embeds=embeddings, attention_mask=None, past_key_values=None,
        position_ids=places,
    )


CLASSES: dict[str, tuple[str, Callable[[Trained, Tensor], tuple[Tensor, _Held]]]] = {
    "gpt2": ("GPT2LMHeadModel", _enter_gpt2),
    "llama": ("LlamaForCausalLM", _enter_llama),
    "mistral": ("MistralForCausalLM", _enter_llama),
    "qwen2": ("Qwen2ForCausalLM", _enter_llama),
}
"""By the config's model_type: the class of transformers, and what its inner model does before its
blocks."""


def build(
    spec: TransformersModel, *, seed: int, dtype: str,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> nn.Module:
    """The real module of `spec` in `dtype`, its parameters drawn by name; ModelError when
    transformers is not installed."""
    try:
        import transformers  # an extra
    except ImportError:
        raise ModelError(
            where="model.huggingface",
            expected="transformers, whose modules these are",
            found="it is not installed",
            remedy="pip install 'zsim[real,huggingface]', or simulate without it",
        ) from None
    given = json.loads(spec.config) | {"attn_implementation": "sdpa", "return_dict": True}
    name, enter = CLASSES[given["model_type"]]
    base: Any = getattr(transformers, name)
    kind = type(name, (Trained, base), {"__module__": base.__module__, "_enter": enter})
    try:
        model: Any = kind(transformers.AutoConfig.for_model(**given))
    except Exception as error:  # whatever transformers has against what somebody wrote
        told = (str(error).strip().splitlines() or [""])[0][:200]
        raise ModelError(
            where="model.huggingface", expected="a config.json that transformers can use",
            found=f"{type(error).__name__}: {told}",
        ) from error
    model.spec = spec
    model.train()
    trained = {parameter.fqn: parameter for parameter in spec.parameters}
    for name, parameter in model.named_parameters():
        parameter.data = initial(trained[name], seed=seed).to(DTYPES[dtype])
        parameter.requires_grad_(trained[name].requires_grad)
    for fqn in checkpointing.applies_to(spec):
        _checkpointed(model.get_submodule(fqn), checkpointing)
    return cast(nn.Module, model)


def _checkpointed(layer: Any, asked: Checkpointing) -> None:
    """Have `layer` recomputed by transformers' own switch, which checkpoints its forward."""
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(
        recomputed, save=asked.save, every=asked.save_every
    )
