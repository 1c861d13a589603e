"""Operators: the vocabulary that models are made of. The README beside
`zsim.autograd` says how one is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

OperatorKind = Literal[
    "linear",
    "embedding",
    "positions",
    "layer_norm",
    "rms_norm",
    "attention",
    "rotary",
    "gelu",
    "swiglu",
    "residual",
    "cast",
    "cross_entropy",
    "upcast_norm",
    "shifted_norm",
    "scale",
    "rotary_tables",
    "heads",
    "rotate",
    "rotate_part",
    "chunk",
    "parts",
    "by_token",
    "silu",
    "multiply",
    "conv1d",
    "split",
    "dropout",
    "gelu_new",
    "position_embedding",
    "causal_loss",
    "traced",
]


AttentionKind = Literal["explicit", "sdpa", "flash", "efficient", "math"]
"""Softmax of materialised scores in the module's own code, scaled_dot_product_attention with the
kernel that torch takes, or one of its kernels asked for by `torch.nn.attention.sdpa_kernel`."""


COMPOSITE = "composite"
"""Implementation of an rms_norm or a cross_entropy that the model's own code makes of single calls.
"""

ONE_NODE = "one_node"
"""Implementation of a linear that is one node of autograd and saves its parameters themselves, not
views of their memory: DeepSpeed's `memory_efficient_linear`."""


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Operator:
    """One operator of a module's dataflow: reads the values `inputs`, writes the value `output`.

    Values are names local to the module: "x" is the module's input and its last `output` is what it
    returns. The root's first module reads "tokens" (int64 ids) or, in family mlp, "x" (float).
    `cross_entropy` reads the logits and the value "targets". Parameters are named by fqn (`weight`,
    `bias`; "" when there is none; a tied head names the embedding's weight). Sizes are features per
    token; unused ones are 0.

    - linear: in_features -> out_features; its `implementation`: "", or ONE_NODE.
    - embedding: num_embeddings × out_features.
    - positions: adds rows 0..s-1 of a learned table (num_embeddings × out_features).
    - layer_norm, rms_norm, gelu, residual: out_features. swiglu: silu(inputs[0]) * inputs[1].
      The `implementation` of rms_norm and cross_entropy: "", or COMPOSITE.
    - rotary: turns num_heads heads of head_dim.
    - attention: inputs q, k, v; num_heads, num_kv_heads, head_dim; `implementation` an
      AttentionKind; causal. dropout: out_features.
    - traced: the calls that a tracer saw (`zsim.autograd.traced.model`).

    From upcast_norm to causal_loss: what modules of transformers are made of;
    `zsim.autograd.aten.transformers` and `zsim.autograd.aten.gpt2` say how. A value with a colon in
    its name is another module's. `reads` are such values that need no gradient: a piece that is
    recomputed holds them. `drops` are values that Python holds past their last use, and that go
    when this operator is over.
    """

    kind: Final[OperatorKind]
    name: Final[str]
    inputs: Final[tuple[str, ...]]
    output: Final[str]
    weight: Final[str] = ""
    bias: Final[str] = ""
    in_features: Final[int] = 0
    out_features: Final[int] = 0
    num_embeddings: Final[int] = 0
    num_heads: Final[int] = 0
    num_kv_heads: Final[int] = 0
    head_dim: Final[int] = 0
    implementation: Final[str] = ""
    causal: Final[bool] = True
    dropout: Final[float] = 0.0
    """Share of numbers that dropout makes 0: of a dropout, or of attention's probabilities."""
    fused_inputs: Final[bool] = False
    """Queries, keys and values are parts of one tensor; their views are made keys first, as GPT-2
    of transformers does."""
    num_by_head: Final[int] = 0
    """Number of attention's first inputs that lie by head, as rotary leaves them; the others lie by
    token."""
    reads: Final[tuple[str, ...]] = ()
    drops: Final[tuple[str, ...]] = ()
    dtype: Final[str] = ""
    """Dtype in which an operator runs, "" for that of the model; a cast makes its input of it."""
