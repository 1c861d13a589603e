"""The model: an embedding, blocks, a head of its own weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

WIDTH, HEADS, VOCABULARY, LAYERS = 32, 4, 128, 3


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(gelu(self.up(self.mlp_norm(x))))


class TinyLM(nn.Module):
    """Logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor) -> Tensor:
    """Cross-entropy of predicting token 0 everywhere: enough to train on."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> dict[str, object]:
    """The module as `zsim validate --module tinylm.model:build` takes it."""
    tokens = torch.randint(VOCABULARY, (2, 16))
    return {"module": TinyLM(), "inputs": [tokens], "loss": next_token_loss}
