"""Modules as users write them, with the data they run on: torch's own layers, convolutions, odd
ones, transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zreal.tracing.operators.split_nodes import NUM_UNITS, SPLIT, rows
from zsim.models.training_options import Dtype


class Encoder(nn.Module):
    """torch's own transformer layers, with dropout, between an embedding and a head that may share
    their weight."""

    def __init__(
        self, *, tied: bool = False, checkpointed: bool = False, num_layers: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(64, 300, bias=not tied)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Convolutions(nn.Module):
    """Norms with buffers that are updated in place, activations in place, pooling."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        widths = ((3, 8), (8, 16), (16, 32))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), norm(b), nn.ReLU(inplace=True), nn.MaxPool2d(2)
            )
            for a, b in widths
        )
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return functional.cross_entropy(self.head(images.flatten(1)), targets)


class _Pairs(nn.Module):
    """Two tensors in and, in a dict, two out; a keyword; sums in place; a weight of two halves; a
    weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ParameterList(torch.ones(16, 32) for _ in range(2))
        self.twice = nn.Linear(32, 32)
        self.gain = nn.Parameter(torch.ones(32))

    def forward(
        self, pair: tuple[Tensor, Tensor], *, scale: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = pair
        hidden = functional.linear(x, torch.cat(tuple(self.halves))) * scale
        hidden += y
        y = self.twice(self.twice(hidden).relu()) * self.gain
        return x + y, {"y": y}


class Pairs(nn.Module):
    """Units that pass more than one tensor on, and a root that computes beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(_Pairs() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        y, scale = x.sin(), torch.linspace(0, 1, 32, dtype=x.dtype)
        for block in self.blocks:
            x, rest = block((x, y), scale=scale)
            y = rest["y"]
        return (x * y).mean()


class Lora(nn.Module):
    """A frozen linear with a low-rank product beside it, which is trained: the input goes through
    both."""

    def __init__(self, base: nn.Linear, *, rank: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * self.scale


class _Adapted(nn.Module):
    """A block as LoRA finds it: attention whose query and value are adapted, a plain MLP, norms."""

    def __init__(self, width: int, *, dropout: float, rank: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.requires_grad_(False)
        if rank:
            self.query, self.value = (
                Lora(linear, rank=rank, dropout=dropout) for linear in (self.query, self.value)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        query, key, value = (
            linear(h).unflatten(-1, (4, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Adapted(nn.Module):
    """A frozen transformer with low-rank adapters in its blocks from `first` on; all before them
    needs no gradient."""

    def __init__(
        self, *, dropout: float = 0.0, first: int = 0, width: int = 32, head: bool = False,
        num_layers: int = 4,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, width).requires_grad_(False)
        self.blocks = nn.ModuleList(
            _Adapted(width, dropout=dropout, rank=4 * (i >= first)) for i in range(num_layers)
        )
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.head = nn.Linear(width, 300, bias=False).requires_grad_(head)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def frozen(make: Callable[[], nn.Module], *, trained: str) -> Callable[[], nn.Module]:
    """`make` with every parameter frozen but those whose name matches the regular expression
    `trained`."""

    def made() -> nn.Module:
        model = make()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(trained, name) is not None)
        return model

    return made


def llama(**options: Any) -> nn.Module:
    """A small LlamaForCausalLM."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **options,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """A small GPT2LMHeadModel: dropout, tied weights, the layer that transformers calls Conv1D."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=320, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def tokens(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randint(300, shape), torch.randint(300, shape)


def sentences(*, length: int = 16, padding: int | None = None) -> dict[str, Tensor]:
    """input_ids and labels and, with `padding`, a mask whose first sentence ends that much earlier.
    """
    ids = torch.randint(300, (2, length))
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, length - (padding or 0) :] = 0
    return {"input_ids": ids, "labels": ids.clone()} | (
        {} if padding is None else {"attention_mask": mask}
    )


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    units: str
    data: Callable[[], Any]
    num_units: int = 4
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    more: tuple[str, ...] = ()
    makes_loss: Callable[[Any], Tensor] | None = None
    """The loss of what the module returns, which its caller makes."""

    @property
    def all_units(self) -> list[str]:
        return [*(f"{self.units}.{i}" for i in range(self.num_units)), *self.more]

    def loss(self, output: Any) -> Tensor:
        if self.makes_loss is not None:
            return self.makes_loss(output)
        return output if isinstance(output, Tensor) else output.loss

    def run(self, model: nn.Module, given: Any) -> Tensor:
        return self.loss(model(**given) if isinstance(given, dict) else model(*given))


CASES = {
    "encoder": Case(Encoder, "layers", lambda: tokens(2, 16)),
    "encoder, tied, logits largest": Case(
        lambda: Encoder(tied=True), "layers", lambda: tokens(2, 64)
    ),
    "encoder, checkpointed": Case(
        lambda: Encoder(checkpointed=True), "layers", lambda: tokens(2, 64)
    ),
    "encoder, whole": Case(Encoder, "layers", lambda: tokens(2, 16), num_units=0),
    "convolutions": Case(  # with bfloat16 weights torch on the CPU refuses a BatchNorm whose buffers are float32  # noqa: E501
        lambda: Convolutions(nn.BatchNorm2d), "blocks",
        lambda: (torch.randn(4, 3, 32, 32), torch.randint(10, (4,))), num_units=3,
        dtypes=("float32",),
    ),
    "convolutions, cast": Case(
        lambda: Convolutions(lambda width: nn.GroupNorm(2, width)), "blocks",
        lambda: (torch.randn(4, 3, 32, 32), torch.randint(10, (4,))), num_units=3,
    ),
    "pairs": Case(Pairs, "blocks", lambda: (torch.randn(4, 16),)),
    "llama": Case(llama, "model.layers", sentences),
    "llama, no cache": Case(lambda: llama(use_cache=False), "model.layers", sentences),
    "llama, padded": Case(
        lambda: llama(use_cache=False), "model.layers", lambda: sentences(padding=3)
    ),
    "llama, explicit, tied": Case(
        lambda: llama(attn_implementation="eager", tie_word_embeddings=True), "model.layers",
        sentences,
    ),
    "llama, ends apart": Case(
        llama, "model.layers", sentences, more=("model.embed_tokens", "model.norm", "lm_head")
    ),
    "gpt2": Case(gpt2, "transformer.h", sentences),
    "gpt2, all ones": Case(gpt2, "transformer.h", lambda: sentences(padding=0)),
    "turned": Case(SPLIT["turned"], "layers", rows, num_units=NUM_UNITS),
    "decoders, whole": Case(SPLIT["decoders"], "layers", rows, num_units=0),
}
SHARING = {"decoders": Case(SPLIT["decoders"], "layers", rows, num_units=NUM_UNITS)}
"""Units that share their second input: its gradients are added up when a unit is over, and not
where a plain step adds them."""
DEEP = {
    "encoder": Case(lambda: Encoder(num_layers=6), "layers", lambda: tokens(2, 16), num_units=6),
    "adapters": Case(lambda: Adapted(num_layers=6), "blocks", lambda: tokens(2, 16), num_units=6),
}
"""Modules of as many layers as the record of the matrix has of them."""
FROZEN = {
    "adapters": Case(Adapted, "blocks", lambda: tokens(2, 16)),
    "adapters, dropout": Case(lambda: Adapted(dropout=0.1), "blocks", lambda: tokens(2, 16)),
    "adapters in later blocks, head": Case(
        lambda: Adapted(first=2, head=True), "blocks", lambda: tokens(2, 16)
    ),
    "encoder, biases only": Case(frozen(Encoder, trained="bias"), "layers", lambda: tokens(2, 16)),
    "encoder, norms only, checkpointed": Case(
        frozen(lambda: Encoder(checkpointed=True), trained=r"norm\d"), "layers",
        lambda: tokens(2, 16),
    ),
    "llama, query and value": Case(frozen(llama, trained=r"[qv]_proj"), "model.layers", sentences),
    "llama, norms only": Case(
        frozen(lambda: llama(attn_implementation="eager"), trained="norm"), "model.layers",
        sentences,
    ),
    "llama, last layers": Case(
        frozen(llama, trained=r"layers\.[23]|lm_head"), "model.layers", sentences
    ),
}


def _slow(pair: Any) -> Any:
    return pair if hasattr(pair, "marks") else pytest.param(*pair, marks=pytest.mark.slow)


PAIRS = [
    (name, dtype)
    if dtype == case.dtypes[index % len(case.dtypes)]
    else pytest.param(name, dtype, marks=pytest.mark.slow)
    for index, (name, case) in enumerate(CASES.items())
    for dtype in case.dtypes
]
"""Each module in each of its dtypes; the suite takes every module in one of them."""
HALF_OF_PAIRS = [pair if index % 2 == 0 else _slow(pair) for index, pair in enumerate(PAIRS)]
SOME_PAIRS = [pair if index % 6 == 0 else _slow(pair) for index, pair in enumerate(PAIRS)]
"""The same, of which the suite takes half or a sixth."""
