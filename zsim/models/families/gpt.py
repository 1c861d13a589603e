"""gpt: learned positions, pre-norm blocks with biases, GELU, tied head. GPT-2, GPT-3 and MPT have
this shape."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.models.families.layers import (
    LossDtype,
    dropped,
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
class GptSizes:
    """Sizes of a gpt."""

    num_layers: int
    """Blocks."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Attention heads of each block."""
    vocabulary: int
    """Tokens that the model knows."""
    max_positions: int = 0
    """Rows of learned positions; 0 for the sequence length."""
    feed_forward: int = 0
    """Width inside each feed-forward; 0 for four times `hidden_size`."""
    tied: bool = True
    """The head shares the embedding's weight."""
    attention: AttentionKind = "explicit"
    """Kernels of attention."""
    attention_dropout: float = 0.0
    """Share of attention's probabilities that dropout makes 0."""
    residual_dropout: float = 0.0
    """Share of the outputs of attention and MLP that dropout makes 0."""
    loss_dtype: LossDtype = "model"
    """Dtype of the loss: the "model"'s, or logits cast to "float32" before it."""


def _block(sizes: GptSizes, index: int) -> Module:
    fqn, width = f"blocks.{index}", sizes.hidden_size
    feed_forward = sizes.feed_forward or 4 * width
    projections = [
        linear(f"{fqn}.attn.{part}", "n1", part, width, width) for part in ("q", "k", "v")
    ]
    attention = Operator(
        kind="attention",
        name=f"{fqn}.attn",
        inputs=("q", "k", "v"),
        output="mixed",
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=width // sizes.num_heads,
        implementation=sizes.attention,
        dropout=sizes.attention_dropout,
    )
    attended, a = dropped(sizes.residual_dropout, f"{fqn}.attn.dropout", "a", width)
    fed, m = dropped(sizes.residual_dropout, f"{fqn}.mlp.dropout", "m", width)
    return Module(
        fqn=fqn,
        unit=fqn,
        operators=(
            norm("layer_norm", f"{fqn}.ln_1", "x", "n1", width),
            *projections,
            attention,
            linear(f"{fqn}.attn.proj", "mixed", "a", width, width),
            *attended,
            elementwise("residual", f"{fqn}.add_1", ("x", a), "h", width),
            norm("layer_norm", f"{fqn}.ln_2", "h", "n2", width),
            linear(f"{fqn}.mlp.fc", "n2", "wide", width, feed_forward),
            elementwise("gelu", f"{fqn}.mlp.gelu", ("wide",), "act", feed_forward),
            linear(f"{fqn}.mlp.proj", "act", "m", feed_forward, width),
            *fed,
            elementwise("residual", f"{fqn}.add_2", ("h", m), "y", width),
        ),
    )


def _embed(sizes: GptSizes, sequence_length: int) -> Module:
    rows, width = sizes.max_positions or sequence_length, sizes.hidden_size
    tokens = embedding("embedding", "wte", "tokens", "e", rows=sizes.vocabulary, width=width)
    places = embedding("positions", "wpe", "e", "h", rows=rows, width=width)
    return Module(fqn="embed", unit=ROOT, operators=(tokens, places))


def build(sizes: GptSizes, *, name: str, sequence_length: int) -> ModelSpec:
    """The ModelSpec; tokens in, mean cross-entropy out. ScenarioError when the heads do not divide
    hidden_size."""
    require_dividing_heads(sizes.num_heads, sizes.hidden_size)
    final_norm = norm("layer_norm", "ln_f", "x", "n", sizes.hidden_size)
    return language_model(
        name, family="gpt", embed=_embed(sizes, sequence_length),
        blocks=tuple(_block(sizes, index) for index in range(sizes.num_layers)),
        head=head(
            final_norm, vocabulary=sizes.vocabulary, tied=sizes.tied, loss_dtype=sizes.loss_dtype
        ),
    )


FAMILY = Family(sizes=GptSizes, build=build)
