"""llama, mistral, qwen2, qwen3, gemma and phi3 as the modules of transformers run them.

They are one decoder with other norms, projections and activations, which `Ways` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zsim.models.families.layers import called_dropout, elementwise, embedding, linear, norm
from zsim.models.families.llama import LlamaSizes
from zsim.models.families.transformers import (
    EMBED,
    PLACES,
    TransformersModel,
    assembled,
    loss_module,
)
from zsim.models.operators import Operator, OperatorKind
from zsim.models.spec import ROOT, Module

ORDER = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o", "qkv")),
    *(f"self_attn.{part}_norm" for part in "qk"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)
TABLES = (f"{EMBED}:h.cos", f"{EMBED}:h.sin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Differences of a kind from llama.

    - `norm`: its RMS norms. `head_norms`: queries and keys have some too.
    - `scaled`: embeddings are multiplied by a number. `activation` of the gated MLP.
    - `merged`: one product makes queries, keys and values, another both parts of the MLP; the first
      `rotary_dim` features of a head are turned.
    - `tokens_first`: which of its locals the inner model lets go of first.
    """

    norm: OperatorKind = "upcast_norm"
    head_norms: bool = False
    scaled: bool = False
    merged: bool = False
    activation: OperatorKind = "silu"
    tokens_first: bool = False


WAYS = {
    "llama": Ways(),
    "mistral": Ways(),
    "qwen2": Ways(tokens_first=True),
    "qwen3": Ways(tokens_first=True, head_norms=True),
    "phi3": Ways(merged=True),
    "gemma": Ways(norm="shifted_norm", scaled=True, activation="gelu"),
}


def llama_like(
    sizes: LlamaSizes, *, name: str, config: str, rotated: float = 1.0
) -> TransformersModel:
    """The causal language model of the kind `name`, one of WAYS; `rotated` is the share of each
    head's features that rotary positions turn."""
    ways = WAYS[name]
    width, head_dim = sizes.hidden_size, sizes.head_dim or sizes.hidden_size // sizes.num_heads
    rotary_dim = int(head_dim * rotated)
    looked_up = "s" if ways.scaled else "e"
    tokens = embedding(
        "embedding", "model.embed_tokens", "tokens", looked_up, rows=sizes.vocabulary, width=width
    )
    scaled = elementwise("scale", "model.embed_tokens.scale", ("s",), "e", width)
    tables = Operator(
        kind="rotary_tables", name="model.rotary_emb", inputs=("e",), output="h",
        out_features=width, head_dim=rotary_dim,
    )
    places = (f"{EMBED}:e", PLACES) if ways.tokens_first else (PLACES, f"{EMBED}:e")
    return assembled(
        name,
        Module(
            fqn=EMBED, unit=ROOT, operators=(tokens, *([scaled] if ways.scaled else []), tables)
        ),
        tuple(
            _block(sizes, ways, f"model.layers.{i}", head_dim, rotary_dim)
            for i in range(sizes.num_layers)
        ),
        loss_module(
            norm(ways.norm, "model.norm", "x", "n", width), frame=(*places, *TABLES),
            vocabulary=sizes.vocabulary,
            weight="model.embed_tokens.weight" if sizes.tied else "lm_head.weight",
        ),
        config=config, order=ORDER,
        buffers=(*([4] if ways.scaled else []), 2 * rotary_dim, 2 * rotary_dim),
    )


def _mlp(sizes: LlamaSizes, ways: Ways, fqn: str) -> Iterator[Operator]:
    """The gated MLP of a block, from "n2" to "m"."""
    width, wide = sizes.hidden_size, sizes.feed_forward
    if ways.merged:
        yield linear(f"{fqn}.mlp.gate_up_proj", "n2", "gate_up", width, 2 * wide, bias=False)
        yield elementwise("chunk", f"{fqn}.mlp.chunk", ("gate_up",), "gate", wide)
        yield elementwise(ways.activation, f"{fqn}.mlp.activation_fn", ("gate",), "gated", wide)
        yield elementwise(
            "multiply", f"{fqn}.mlp.product", ("gate.other", "gated"), "act", wide
        )
        down = linear(f"{fqn}.mlp.down_proj", "act", "m", wide, width, bias=False)
        yield replace(down, drops=("act", "gate", "n2"))
        return
    yield linear(f"{fqn}.mlp.gate_proj", "n2", "gate", width, wide, bias=sizes.mlp_bias)
    yield elementwise(ways.activation, f"{fqn}.mlp.act_fn", ("gate",), "gated", wide)
    yield linear(f"{fqn}.mlp.up_proj", "n2", "up", width, wide, bias=sizes.mlp_bias)
    yield elementwise("multiply", f"{fqn}.mlp.product", ("gated", "up"), "act", wide)
    down = linear(f"{fqn}.mlp.down_proj", "act", "m", wide, width, bias=sizes.mlp_bias)
    yield replace(down, drops=("act", "n2"))


def _projected(
    sizes: LlamaSizes, ways: Ways, fqn: str, heads: dict[str, int], shape: Operator
) -> Iterator[Operator]:
    """Queries and keys by head, and values, whose gradient comes as it lies, of "n1"."""
    if ways.merged:
        both = (sizes.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        yield linear(f"{fqn}.qkv_proj", "n1", "qkv", sizes.hidden_size, both, bias=False)
        yield replace(shape, kind="parts", name=f"{fqn}.parts", inputs=("qkv",), output="q")
        for part, source in (("q", "q"), ("k", "q.key")):
            yield replace(
                shape, kind="heads", name=f"{fqn}.{part}_heads", inputs=(source,),
                output=f"{part}_heads", num_heads=heads[part],
            )
        return
    for part, count in heads.items():
        yield linear(
            f"{fqn}.{part}_proj", "n1", part, sizes.hidden_size, count * shape.head_dim,
            bias=sizes.qkv_bias,
        )
        if part == "v":
            return
        by_head = replace(
            shape, kind="heads", name=f"{fqn}.{part}_heads", inputs=(part,),
            output=f"{part}_heads", num_heads=count,
        )
        if not ways.head_norms:
            yield by_head
            continue
        yield replace(by_head, output=f"{part}_view")
        yield replace(
            norm(ways.norm, f"{fqn}.{part}_norm", f"{part}_view", f"{part}_heads", shape.head_dim),
            num_heads=count, drops=(part, f"{part}_view"),
        )


def _block(
    sizes: LlamaSizes, ways: Ways, fqn: str, head_dim: int, rotary_dim: int
) -> Module:
    width, kv_heads = sizes.hidden_size, sizes.num_kv_heads or sizes.num_heads
    attention = f"{fqn}.self_attn"
    heads = {"q": sizes.num_heads, "k": kv_heads, "v": kv_heads}
    shape = Operator(
        kind="rotate_part" if ways.merged else "rotate",
        name=f"{attention}.rotary",
        inputs=("q_heads", "k_heads"),
        output="turned",
        num_heads=sizes.num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        in_features=rotary_dim if ways.merged else 0,
    )
    value, held = ("q.value", ("qkv",)) if ways.merged else ("v", ())
    mix = replace(
        shape,
        kind="attention",
        name=attention,
        inputs=("turned.query", "turned", value),
        in_features=0,
        num_by_head=2,
        output="mixed",
        implementation=sizes.attention,
    )
    flat = replace(
        mix, kind="by_token", name=f"{attention}.flat", inputs=("by_head",), num_by_head=0,
        implementation="",
    )
    mixed = (replace(mix, output="by_head"), flat) if ways.merged else (mix,)
    projected = replace(
        linear(
            f"{attention}.o_proj", "mixed", "a", sizes.num_heads * head_dim, width,
            bias=sizes.output_bias,
        ), drops=("mixed", "turned.query", "turned", value, *held, "n1"),
    )
    (attended, a), (fed, m) = (
        called_dropout(0.0, f"{fqn}.resid_{part}_dropout", output, width)
        if ways.merged else ((), output)
        for part, output in (("attn", "a"), ("mlp", "m"))
    )
    return Module(
        fqn=fqn, unit=fqn,
        operators=(
            replace(norm(ways.norm, f"{fqn}.input_layernorm", "x", "n1", width), reads=(PLACES,)),
            *_projected(sizes, ways, attention, heads, shape), replace(shape, reads=TABLES), *mixed,
            projected, *attended, elementwise("residual", f"{fqn}.add_1", ("x", a), "h", width),
            norm(ways.norm, f"{fqn}.post_attention_layernorm", "h", "n2", width),
            *_mlp(sizes, ways, fqn), *fed,
            replace(
                elementwise("residual", f"{fqn}.add_2", ("h", m), "y", width), drops=(m, "h")
            ),
        ),
    )
