"""Kinds of config.json whose modules are not simulated: the reason, and how many parameters they
have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Size = Callable[[str, int | None], int]
"""Reads a positive whole number of a config by its key, with a default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A decoder with other parts than those that are simulated.

    `norms` of the hidden width in a block, and one after the last; `head_norms` of a head's width
    too. `products` of the feed-forward. `biases` of every linear and norm. `experts`: the key of
    their number; a router chooses among them. `tied`: the head shares the embedding's weight.
    """

    reason: str
    norms: int = 2
    head_norms: int = 0
    products: int = 3
    biases: bool = False
    experts: str = ""
    head_dim: int | None = None
    tied: bool = False

    def num_parameters(self, size: Size, *, tied: bool) -> int:
        """The parameters of the whole model, which is `tied` or has a head of its own."""
        width, wide = size("hidden_size", None), size("intermediate_size", None)
        heads, vocabulary = size("num_attention_heads", None), size("vocab_size", None)
        bias, head_dim = int(self.biases), size("head_dim", self.head_dim or width // heads)
        grouped = size("num_key_value_heads", heads)
        across, shared = heads * head_dim, grouped * head_dim
        attention = (width + bias) * (across + 2 * shared) + (across + bias) * width
        inner = (self.products - 1) * (width + bias) * wide + (wide + bias) * width
        if self.experts:
            inner = size(self.experts, None) * (inner + width)
        norm = width * (1 + bias)
        block = attention + inner + self.norms * norm + self.head_norms * head_dim
        head = ((0 if tied else width) + bias) * vocabulary
        return size("num_hidden_layers", None) * block + norm + vocabulary * width + head


FOREIGN_KINDS: dict[str, Foreign] = {
    "mixtral": Foreign(reason="experts", experts="num_local_experts"),
    "phi": Foreign(
        reason="blocks of attention beside the MLP", norms=1, products=2, biases=True
    ),
    "gemma2": Foreign(reason="capped scores", norms=4, head_dim=256, tied=True),
    "gemma3_text": Foreign(
        reason="two tables of rotary positions", norms=4, head_norms=2, head_dim=256, tied=True
    ),
}
"""Each with what it has that no family has."""
