"""llama: RMS norm, rotary positions, grouped-query attention, SwiGLU, no biases.

Llama 2 and 3, Mistral and, with biases on q, k and v, Qwen2 have this shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.models.families.layers import (
    LossDtype,
    elementwise,
    embedding,
    head,
    language_model,
    linear,
    norm,
)
from zsim.models.families.size_checks import require_dividing_heads
from zsim.models.family import Family
from zsim.models.operators import AttentionKind, Operator
from zsim.models.spec import ROOT, ModelSpec, Module


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """Sizes of a llama."""

    num_layers: int
    """Blocks."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Attention heads of each block."""
    feed_forward: int
    """Width inside each feed-forward; 0 for four times `hidden_size`."""
    vocabulary: int
    """Tokens that the model knows."""
    num_kv_heads: int = 0
    """Heads of keys and values; 0 for as many as `num_heads`."""
    head_dim: int = 0
    """Width of a head; 0 for hidden_size / num_heads."""
    qkv_bias: bool = False
    """Projections of queries, keys and values have biases."""
    output_bias: bool = False
    """The projection of attention's output has a bias."""
    mlp_bias: bool = False
    """Projections of the feed-forward have biases."""
    tied: bool = False
    """The head shares the embedding's weight."""
    attention: AttentionKind = "sdpa"
    """Kernels of attention."""
    loss_dtype: LossDtype = "model"
    """Dtype of the loss: the "model"'s, or logits cast to "float32" before it."""


def _attention(sizes: LlamaSizes, fqn: str) -> tuple[Operator, ...]:
    head_dim = sizes.head_dim or sizes.hidden_size // sizes.num_heads
    kv_heads = sizes.num_kv_heads or sizes.num_heads
    width, bias = sizes.hidden_size, sizes.qkv_bias
    heads = {"q": sizes.num_heads, "k": kv_heads, "v": kv_heads}
    projections = [
        linear(f"{fqn}.attn.{part}", "n1", part, width, count * head_dim, bias=bias)
        for part, count in heads.items()
    ]
    rotated = [
        Operator(
            kind="rotary",
            name=f"{fqn}.attn.rotary_{part}",
            inputs=(part,),
            output=f"{part}r",
            num_heads=heads[part],
            head_dim=head_dim,
        )
        for part in ("q", "k")
    ]
    mix = Operator(
        kind="attention",
        name=f"{fqn}.attn",
        inputs=("qr", "kr", "v"),
        output="mixed",
        num_heads=sizes.num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        implementation=sizes.attention,
    )
    out = linear(
        f"{fqn}.attn.o", "mixed", "a", sizes.num_heads * head_dim, width, bias=sizes.output_bias
    )
    return (*projections, *rotated, mix, out)


def _block(sizes: LlamaSizes, index: int) -> Module:
    fqn, width, wide = f"blocks.{index}", sizes.hidden_size, sizes.feed_forward
    return Module(
        fqn=fqn,
        unit=fqn,
        operators=(
            norm("rms_norm", f"{fqn}.norm_1", "x", "n1", width),
            *_attention(sizes, fqn),
            elementwise("residual", f"{fqn}.add_1", ("x", "a"), "h", width),
            norm("rms_norm", f"{fqn}.norm_2", "h", "n2", width),
            linear(f"{fqn}.mlp.gate", "n2", "gate", width, wide, bias=sizes.mlp_bias),
            linear(f"{fqn}.mlp.up", "n2", "up", width, wide, bias=sizes.mlp_bias),
            elementwise("swiglu", f"{fqn}.mlp.swiglu", ("gate", "up"), "act", wide),
            linear(f"{fqn}.mlp.down", "act", "m", wide, width, bias=sizes.mlp_bias),
            elementwise("residual", f"{fqn}.add_2", ("h", "m"), "y", width),
        ),
    )


def build(sizes: LlamaSizes, *, name: str, sequence_length: int) -> ModelSpec:
    """The ModelSpec; tokens in, mean cross-entropy out. ScenarioError when the heads do not divide
    hidden_size."""
    if not sizes.head_dim or sizes.num_heads < 1:
        require_dividing_heads(sizes.num_heads, sizes.hidden_size)
    tokens = embedding(
        "embedding", "wte", "tokens", "h", rows=sizes.vocabulary, width=sizes.hidden_size
    )
    final_norm = norm("rms_norm", "norm_f", "x", "n", sizes.hidden_size)
    return language_model(
        name, family="llama", embed=Module(fqn="embed", unit=ROOT, operators=(tokens,)),
        blocks=tuple(_block(sizes, index) for index in range(sizes.num_layers)),
        head=head(
            final_norm, vocabulary=sizes.vocabulary, tied=sizes.tied, loss_dtype=sizes.loss_dtype
        ),
    )


FAMILY = Family(sizes=LlamaSizes, build=build)
