"""Modules of transformers as they run: their names, their operators, the order of their parameters.
GPT-2 is here, `llama_like` has the others.

The sizes are those of the families; what differs is how the code computes. Trained as its Trainer
does: in training mode, without a cache of keys and values, with labels, from which the module
itself makes the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.models.families.gpt import GptSizes
from zsim.models.families.layers import (
    called_dropout,
    elementwise,
    embedding,
    linear,
    norm,
    parameters_of,
)
from zsim.models.operators import Operator
from zsim.models.spec import ROOT, TRANSFORMERS, ModelSpec, Module, Parameter, ParamGroup

EMBED, HEAD = "embed", "head"
PLACES = f"{EMBED}:h.places"
"""The places of tokens, which the model's own forward holds until its last norm is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel(ModelSpec):
    """A model of transformers; `config` is its config.json."""

    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Shares of embeddings, of the outputs of attention and MLP, and of attention's probabilities
    that dropout makes 0."""

    embedding: float = 0.0
    residual: float = 0.0
    attention: float = 0.0


def _conv1d(name: str, source: str, output: str, in_features: int, out_features: int) -> Operator:
    return replace(linear(name, source, output, in_features, out_features), kind="conv1d")


def loss_module(
    norm_f: Operator, *, frame: tuple[str, ...], vocabulary: int, weight: str
) -> Module:
    """The last norm and the logits. The inner model's locals go after the norm; the output holds
    the logits until the loss."""
    width = norm_f.out_features
    return Module(
        fqn=HEAD,
        unit=ROOT,
        operators=(
            replace(norm_f, drops=("x", *frame)),
            replace(linear("lm_head", "n", "logits", width, vocabulary, bias=False), weight=weight),
            Operator(
                kind="causal_loss",
                name="loss",
                inputs=("logits", "targets"),
                output="loss",
                out_features=vocabulary,
                drops=("n", "logits"),
            ),
        ),
    )


def assembled(
    name: str, embed: Module, blocks: tuple[Module, ...], head: Module, *, config: str,
    order: tuple[str, ...], buffers: tuple[int, ...],
) -> TransformersModel:
    """The model; `order` are the names of a block's parameters, without their last parts, as it
    registers them, `buffers` bytes."""

    def own(block: Module) -> tuple[Parameter, ...]:
        indices = {f"{block.fqn}.{part}": index for index, part in enumerate(order)}
        return tuple(
            sorted(
                parameters_of(block), key=lambda p: indices[p.fqn.rpartition(".")[0]]
            )
        )

    root = parameters_of(embed, head)
    units = tuple(ParamGroup(fqn=block.fqn, parameters=own(block)) for block in blocks)
    first = {parameter.fqn for parameter in parameters_of(embed)}
    registered = (
        *(p.fqn for p in root if p.fqn in first),
        *(p.fqn for unit in units for p in unit.parameters),
        *(p.fqn for p in root if p.fqn not in first),
    )
    return TransformersModel(
        name=name,
        family=TRANSFORMERS,
        modules=(embed, *blocks, head),
        units=(ParamGroup(fqn=ROOT, parameters=root), *units),
        config=config,
        registered=registered,
        buffers=tuple(("float32", nbytes) for nbytes in buffers),
    )


GPT2_ORDER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


def gpt2(sizes: GptSizes, *, activation: str, config: str, dropout: Dropout) -> TransformersModel:
    """GPT2LMHeadModel. `activation` is "gelu_new", written out in Python, or one that is a kernel
    of torch."""
    width = sizes.hidden_size
    tokens = embedding(
        "embedding", "transformer.wte", "tokens", "e", rows=sizes.vocabulary, width=width
    )
    indices = embedding(
        "position_embedding", "transformer.wpe", "e", "h", rows=sizes.max_positions, width=width
    )
    dropping, _ = called_dropout(dropout.embedding, "transformer.drop", "h", width)
    return assembled(
        "gpt2", Module(fqn=EMBED, unit=ROOT, operators=(tokens, indices, *dropping)),
        tuple(
            _gpt2_block(sizes, f"transformer.h.{i}", activation, dropout)
            for i in range(sizes.num_layers)
        ),
        loss_module(
            norm("layer_norm", "transformer.ln_f", "x", "n", width),
            frame=(PLACES, f"{EMBED}:e", f"{EMBED}:h.rows"), vocabulary=sizes.vocabulary,
            weight="transformer.wte.weight" if sizes.tied else "lm_head.weight",
        ),
        config=config, order=GPT2_ORDER, buffers=(),
    )


def _gpt2_block(sizes: GptSizes, fqn: str, activation: str, dropout: Dropout) -> Module:
    width = sizes.hidden_size
    feed_forward = sizes.feed_forward or 4 * width
    attended, a = called_dropout(dropout.residual, f"{fqn}.attn.resid_dropout", "a", width)
    projected = (_conv1d(f"{fqn}.attn.c_proj", "mixed", "a", width, width), *attended)
    projected = (*projected[:-1], replace(projected[-1], drops=("a", "q", "q.key", "q.value")))
    fed, m = called_dropout(dropout.residual, f"{fqn}.mlp.dropout", "m", width)
    mix = Operator(
        kind="attention",
        name=f"{fqn}.attn",
        inputs=("q", "q.key", "q.value"),
        fused_inputs=True,
        output="mixed",
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=width // sizes.num_heads,
        implementation=sizes.attention,
        dropout=dropout.attention,
    )
    return Module(
        fqn=fqn, unit=fqn,
        operators=(
            replace(norm("layer_norm", f"{fqn}.ln_1", "x", "n1", width), reads=(PLACES,)),
            _conv1d(f"{fqn}.attn.c_attn", "n1", "qkv", width, 3 * width),
            elementwise("split", f"{fqn}.attn.split", ("qkv",), "q", width), mix, *projected,
            replace(elementwise("residual", f"{fqn}.add_1", (a, "x"), "h", width), drops=("n1",)),
            norm("layer_norm", f"{fqn}.ln_2", "h", "n2", width),
            _conv1d(f"{fqn}.mlp.c_fc", "n2", "wide", width, feed_forward),
            elementwise(
                "gelu_new" if activation == "gelu_new" else "gelu", f"{fqn}.mlp.act", ("wide",),
                "act", feed_forward,
            ),
            _conv1d(f"{fqn}.mlp.c_proj", "act", "m", feed_forward, width), *fed,
            replace(
                elementwise("residual", f"{fqn}.add_2", ("h", m), "y", width),
                drops=("n2", "h", a, m),
            ),
        ),
    )
