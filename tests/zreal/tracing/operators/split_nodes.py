"""Modules of which autograd makes more nodes than one for a linear with a bias, or keeps a copy of
a parameter's gradient.

The gradient of such a bias is accumulated before that of the weight is made. Which linears these
are depends on how their inputs and outputs lie, so that it can only be seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 24
LENGTH = 11
NUM_UNITS = 4


class Chain(nn.Module):
    """Blocks between a projection and a sum; those that attend to something `given` get a second
    input."""

    def __init__(self, block: Callable[[], nn.Module], *, given: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(block() for _ in range(NUM_UNITS))
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        memory = (x * 2,) if self.given else ()
        for layer in self.layers:
            x = layer(x, *memory)
        return x.sum()


class Sliced(nn.Module):
    """The next linear reads a part of this one's output, which does not lie together: it multiplies
    first and adds its bias then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., :WIDTH]


class Crossed(nn.Module):
    """Cross-attention: one weight is cut in two, for what asks and what is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attention(x, memory, memory, need_weights=False)[0]


class Turned(nn.Module):
    """A gradient that lies otherwise than its weight: what is kept is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,oi->bto", x, self.weight) + self.bias


class Placed(nn.Module):
    """A parameter as large as what it is added to: its gradient goes on as that of the input.
    Autograd accumulates a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(2, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.places)[..., :WIDTH]


class Early(nn.Module):
    """Weights that the root turns before its blocks and multiplies with after them: what made them
    ends backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_UNITS))
        self.first, self.last = (
            nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        turned = self.last.t()
        x = x @ self.first.t()
        for layer in self.layers:
            x = layer(x)
        return (x @ turned).sum()


def decoder() -> nn.Module:
    """torch's own layer with self-attention, cross-attention and an MLP."""
    return nn.TransformerDecoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)


SPLIT: dict[str, Callable[[], nn.Module]] = {
    "sliced": lambda: Chain(Sliced), "crossed": lambda: Chain(Crossed, given=True),
    "decoders": lambda: Chain(decoder, given=True), "turned": lambda: Chain(Turned),
    "placed": lambda: Chain(Placed), "early": Early,
}


def rows() -> tuple[Tensor, ...]:
    return (torch.randn(2, LENGTH, WIDTH),)
