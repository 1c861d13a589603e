"""The modules of transformers themselves, made of a config.json: what a scenario with `model.huggingface` really trains.

They train as transformers' own Trainer trains them: in training mode, with labels (the tokens, which the module shifts) and without a
cache of keys and values. The whole module is called as it is; `run` is for the executor alone, which enters modules one by one, and says
line by line what the forwards of the two inner models do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from zreal.modules import DTYPES, ModelError, initial, recomputed
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.model import Module
from zsim.models.transformers import EMBED, HEAD, TransformersModel

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}


class Trained(nn.Module):
    """What is laid over a class of transformers: it takes tokens and gives the loss, and tells its parts by the names of the spec."""

    spec: TransformersModel
    _locals: tuple[Any, ...] = ()
    """What the inner model's forward would hold while its blocks run."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens `x`; `targets` are not asked, as the module makes its own of the tokens."""
        return cast(Tensor, super().forward(input_ids=x, labels=x, use_cache=False).loss)

    def parameter(self, fqn: str) -> Tensor | None:
        """The parameter called `fqn`, None for ""."""
        return self.get_parameter(fqn) if fqn else None

    def stretch(self, fqn: str) -> nn.Module:
        """The real module of the spec's module `fqn`, which is not the root's own."""
        return self.get_submodule(fqn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Buffers keep their dtype, as they do when transformers loads a model in two bytes."""
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in list(self.named_buffers()):
            if buffer.dtype != dtypes[name]:
                path, _, last = name.rpartition(".")
                setattr(self.get_submodule(path), last, buffer.to(dtypes[name]))
        return self


def build(spec: TransformersModel, *, seed: int, dtype: str, checkpointing: Checkpointing = NO_CHECKPOINTING) -> nn.Module:
    """The real module of `spec` in `dtype`, its parameters drawn by name; ModelError when transformers is not installed."""
    try:
        import transformers  # an extra
    except ImportError:
        raise ModelError(
            where="model.huggingface",
            expected="transformers, whose modules these are",
            found="it is not installed",
            remedy="pip install 'zsim[test]', or simulate without it",
        ) from None
    given = json.loads(spec.config)
    config = transformers.AutoConfig.for_model(**given)
    base: Any = getattr(transformers, CLASSES[given["model_type"]])
    kind = type(base.__name__, (Trained, base), {"__module__": base.__module__})
    model: Any = kind(config)
    model.spec = spec
    model.train()
    trained = {parameter.fqn: parameter for parameter in spec.parameters}
    for name, parameter in model.named_parameters():
        parameter.data = initial(trained[name], seed=seed).to(DTYPES[dtype])
        parameter.requires_grad_(trained[name].requires_grad)
    for fqn in checkpointing.applies_to(spec):
        _checkpointed(model.get_submodule(fqn), checkpointing)
    return cast(nn.Module, model)
