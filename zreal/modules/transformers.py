"""Modules of transformers built from a config.json, which a scenario names in `model.huggingface`.

They train as under transformers' own Trainer: in training mode, with the tokens as labels, and
without a cache of keys and values. The whole module is called as it is. The executor alone enters
modules one by one through `run`, which repeats the forwards of the two inner models line by line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zreal.modules.checkpointing import checkpointed
from zreal.modules.initial_values import DTYPES, ModelError
from zreal.modules.operators import seed_by
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.families.transformers import EMBED, HEAD, TransformersModel
from zsim.models.spec import Module


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardLocals:
    """Local variables of the inner model's forward, which live while its blocks run."""

    tokens: Tensor
    unread: tuple[Tensor, ...]
    """Values that the forward holds without reading them again."""
    norm: str
    """Name of the module after the last block."""
    block_arguments: Mapping[str, Any]


class TokensToLoss(nn.Module):
    """Mixed into a class of transformers: its forward takes tokens and returns the loss.

    Its parts go by the names of the spec.
    """

    spec: TransformersModel
    _enter: Callable[[Tensor], tuple[Tensor, _ForwardLocals]]
    """The inner model's forward up to its blocks; a function of this file."""
    _locals: _ForwardLocals

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens `x`. The module makes its own targets of them; `targets` are ignored.
        """
        seed_by(x)
        base: Any = super()
        return cast(Tensor, base.forward(input_ids=x, labels=x, use_cache=False).loss)

    def parameter(self, fqn: str) -> Tensor | None:
        """The parameter called `fqn`, None for ""."""
        return self.get_parameter(fqn) if fqn else None

    def module_at(self, fqn: str) -> nn.Module:
        """The torch module of the spec's module `fqn`, which is not the root's own."""
        return self.get_submodule(fqn)

    def run(self, module: Module, x: Tensor, targets: Tensor) -> Tensor:
        """Run one of the modules of `spec`: a block, or the root's part before or after them."""
        if module.fqn == EMBED:
            seed_by(x)
            x, self._locals = self._enter(x)
            return x
        if module.fqn != HEAD:
            return cast(Tensor, self.module_at(module.path)(x, **self._locals.block_arguments))
        tokens = self._locals.tokens
        x = self.get_submodule(self._locals.norm)(x)
        del self._locals
        logits = self.get_submodule("lm_head")(x)
        model: Any = self
        return cast(
            Tensor, model.loss_function(logits=logits, labels=tokens, vocab_size=logits.shape[-1])
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `fn`, but keep the dtype of buffers, as transformers does for 2-byte models."""
        buffers = {id(buffer) for buffer in self.buffers()}

        def kept(tensor: Tensor) -> Tensor:
            if id(tensor) not in buffers:
                return fn(tensor)
            probe = fn(tensor.new_empty(0))  # a cast of the whole would count as construction's
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        return super()._apply(kept, recurse)


def _enter_llama(model: TokensToLoss, tokens: Tensor) -> tuple[Tensor, _ForwardLocals]:
    """LlamaModel.forward up to its blocks, and that of the models made after it."""
    inner: Any = model.get_submodule("model")
    embeddings = inner.embed_tokens(tokens)
    positions = _positions(embeddings)
    _mask(model, embeddings, positions)
    tables = inner.rotary_emb(embeddings, position_ids=positions)
    kept = {
        "attention_mask": None, "position_embeddings": tables, "position_ids": positions
    }
    return embeddings, _ForwardLocals(
        tokens=tokens, unread=(embeddings,), norm="model.norm", block_arguments=kept
    )


def _enter_gpt2(model: TokensToLoss, tokens: Tensor) -> tuple[Tensor, _ForwardLocals]:
    """GPT2Model.forward up to its blocks."""
    inner: Any = model.get_submodule("transformer")
    embeddings = inner.wte(tokens)
    positions = _positions(embeddings)
    rows = inner.wpe(positions)
    x = embeddings + rows
    _mask(model, embeddings, positions)
    x = inner.drop(x)
    return x, _ForwardLocals(
        tokens=tokens, unread=(embeddings, rows), norm="transformer.ln_f",
        block_arguments={"position_ids": positions},
    )


def _positions(embeddings: Tensor) -> Tensor:
    """Positions of tokens that follow no cached ones."""
    return (torch.arange(embeddings.shape[1], device=embeddings.device) + 0).unsqueeze(0)


def _mask(model: Any, embeddings: Tensor, positions: Tensor) -> None:
    """Run transformers' check for packed sequences, which alone need a mask."""
    from transformers import masking_utils  # an extra

    masking_utils.create_causal_mask(  # its cache has another name from release to release
        model.config, embeddings, None, None, position_ids=positions
    )


CLASSES: dict[str, tuple[str, Callable[[TokensToLoss, Tensor], tuple[Tensor, _ForwardLocals]]]] = {
    "gpt2": ("GPT2LMHeadModel", _enter_gpt2),
    "llama": ("LlamaForCausalLM", _enter_llama),
    "mistral": ("MistralForCausalLM", _enter_llama),
    "qwen2": ("Qwen2ForCausalLM", _enter_llama),
    "qwen3": ("Qwen3ForCausalLM", _enter_llama),
    "gemma": ("GemmaForCausalLM", _enter_llama),
    "phi3": ("Phi3ForCausalLM", _enter_llama),
}
"""Class of transformers and its inner model's forward up to the blocks, by the config's
model_type."""


def build(
    spec: TransformersModel, *, dtype: str, checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> nn.Module:
    """The module of `spec` in `dtype`, its parameters on the meta device.

    ModelError where transformers is not installed or refuses the config.
    """
    try:
        import transformers  # an extra
    except ImportError:
        raise ModelError(
            where="model.huggingface",
            expected="transformers, whose modules these are",
            found="no such package",
            remedy="pip install 'zsim[real,huggingface]', or simulate without it",
        ) from None
    config = json.loads(spec.config) | {"attn_implementation": "sdpa", "return_dict": True}
    name, enter = CLASSES[config["model_type"]]
    base: Any = getattr(transformers, name)
    kind = type(name, (TokensToLoss, base), {"__module__": base.__module__, "_enter": enter})
    hook = register_module_parameter_registration_hook(
        cast(Any, partial(_on_meta, dtype=DTYPES[dtype]))
    )
    try:
        model: Any = kind(transformers.AutoConfig.for_model(**config))
    except Exception as error:  # transformers raises anything about a config
        first_line = (str(error).strip().splitlines() or [""])[0][:200]
        raise ModelError(
            where="model.huggingface", expected="a config.json that transformers can use",
            found=f"{type(error).__name__}: {first_line}",
        ) from error
    finally:
        hook.remove()
    model.spec = spec
    model.train()
    for parameter in spec.parameters:
        model.get_parameter(parameter.fqn).requires_grad_(parameter.requires_grad)
    for fqn in checkpointing.applies_to(spec):
        _checkpoint(model.get_submodule(fqn), checkpointing)
    return cast(nn.Module, model)


def _on_meta(
    module: nn.Module, name: str, parameter: nn.Parameter, *, dtype: torch.dtype
) -> nn.Parameter | None:
    """`parameter` without memory, as soon as a module registers it; a shared one stays shared."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"))


def _checkpoint(layer: Any, settings: Checkpointing) -> None:
    """Checkpoint the forward of `layer` with transformers' own switch."""
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(
        checkpointed, save=settings.save, every=settings.save_every
    )
