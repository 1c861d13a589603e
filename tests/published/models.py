"""Modules with the shapes, dtypes and lifetimes of what was measured: torchtitan's Llama and
nanotron's. Written for tracing.

Kernels that torch on a CPU has not (Triton's norm, flash-attn's rotary) stand here as functions of
the same inputs, outputs and saved tensors. Values mean nothing: only sizes and lifetimes are asked
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
PRODUCT = torch.ops.aten.mm.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A Llama's sizes."""

    num_layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int


class EverySecondProduct:
    """torchtitan's selective "op" policy: outputs of attention and of the 1st, 3rd, 5th … product
    are kept, all else is recomputed. Seven products in a block: q, v, gate and down are kept; k, o
    and up are not."""

    def __init__(self) -> None:
        self.products = {False: 0, True: 0}

    def __call__(
        self, context: Any, operator: Any, *arguments: Any, **options: Any
    ) -> CheckpointPolicy:
        self.products[context.is_recompute] += operator == PRODUCT
        kept = operator == ATTENTION or (
            operator == PRODUCT and self.products[context.is_recompute] % 2 == 1
        )
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class WideNorm(nn.Module):
    """RMS norm of separate operators, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.weight


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions by a product of complex numbers, in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(3).type_as(x)


class TitanBlock(nn.Module):
    """torchtitan's block: keys and values are repeated to as many heads as there are queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        plain = partial(nn.Linear, bias=False)
        self.head_dim, self.repeats = sizes.width // sizes.heads, sizes.heads // sizes.kv_heads
        self.norm_1, self.norm_2 = WideNorm(sizes.width), WideNorm(sizes.width)
        self.q, self.o = plain(sizes.width, sizes.width), plain(sizes.width, sizes.width)
        self.k = plain(sizes.width, sizes.kv_heads * self.head_dim)
        self.v = plain(sizes.width, sizes.kv_heads * self.head_dim)
        self.gate, self.up = (
            plain(sizes.width, sizes.feed_forward), plain(sizes.width, sizes.feed_forward),
        )
        self.down = plain(sizes.feed_forward, sizes.width)

    def attention(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        q, k = turned(q, table), turned(k, table)
        k, v = (
            part.repeat_interleave(self.repeats, dim=2) if self.repeats > 1 else part
            for part in (k, v)
        )
        mixed = scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True
        )
        return self.o(mixed.transpose(1, 2).contiguous().flatten(2))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = x + self.attention(self.norm_1(x), table)
        n = self.norm_2(h)
        return h + self.down(silu(self.gate(n)) * self.up(n))


class Selective(nn.Module):
    """A block under torchtitan's checkpoint wrapper, which is what fully_shard is given."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, EverySecondProduct())
        return checkpoint(
            self.block, x, table, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )


class Titan(nn.Module):
    """torchtitan's Llama in eager mode: logits in bf16, cross-entropy of their float32 copy."""

    def __init__(self, sizes: Sizes, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Selective(TitanBlock(sizes)) for _ in range(sizes.num_layers))
        self.norm, self.head = (
            WideNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False),
        )
        pairs = sizes.width // sizes.heads // 2
        self.register_buffer("table", torch.zeros(sequence_length, pairs, dtype=torch.complex64))

    def logits(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, self.table)
        return self.head(self.norm(h))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(tokens)
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


class FusedNorm(Function):
    """One kernel: keeps its input and a float32 statistic per token."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(
            x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        )
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = context.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Norm(nn.Module):
    """RMS norm of one kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return FusedNorm.apply(x, self.weight)


class Turn(Function):
    """Rotary positions of one kernel, which keeps only its tables."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


class TurnInPlace(Function):
    """The same, in place."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.mark_dirty(x)
        return x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class ShardedLoss(Function):
    """Cross-entropy that keeps the softmax and makes the gradient in it."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        softmax = logits - torch.max(logits, dim=-1)[0].unsqueeze(-1)
        chosen = softmax.flatten(0, 1).gather(1, labels.reshape(-1, 1)).view_as(labels)
        torch.exp(softmax, out=softmax)
        total = softmax.sum(-1)
        softmax.div_(total.unsqueeze(-1))
        context.save_for_backward(softmax, labels)
        return torch.log(total) - chosen

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, _ = context.saved_tensors
        return softmax.mul_(gradient.unsqueeze(-1)), None


class NanotronBlock(nn.Module):
    """nanotron's block, sequence first: one product for q, k, v, whose parts are copied into
    flash-attn's layout."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        plain = partial(nn.Linear, bias=False)
        self.heads, self.feed_forward = sizes.heads, sizes.feed_forward
        self.norm_1, self.norm_2 = Norm(sizes.width), Norm(sizes.width)
        self.qkv, self.o = plain(sizes.width, 3 * sizes.width), plain(sizes.width, sizes.width)
        self.gate_up, self.down = (
            plain(sizes.width, 2 * sizes.feed_forward), plain(sizes.feed_forward, sizes.width),
        )

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 1, 0, 3, 4).contiguous()
        pair = torch.stack([k, v]).permute(1, 2, 0, 3, 4).contiguous()
        q, pair = Turn.apply(q), TurnInPlace.apply(pair)
        k, v = (part.squeeze(2) for part in torch.split(pair, 1, dim=2))
        mixed = scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True
        )
        return self.o(mixed.transpose(1, 2).contiguous().flatten(2).transpose(0, 1))

    def feed(self, x: Tensor) -> Tensor:
        gate, up = torch.split(self.gate_up(x), self.feed_forward, dim=-1)
        return self.down(silu(gate) * up)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(self.norm_1(x)) + x
        return self.feed(self.norm_2(h)) + h


class Nanotron(nn.Module):
    """nanotron's Llama with tied embeddings; the logits are float32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(NanotronBlock(sizes) for _ in range(sizes.num_layers))
        self.norm = Norm(sizes.width)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return linear(self.norm(x), self.embedding.weight).float()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(tokens)
        loss = ShardedLoss.apply(logits, labels.transpose(0, 1).contiguous())
        return loss.sum() / loss.numel()
