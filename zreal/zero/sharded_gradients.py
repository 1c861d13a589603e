"""Substitutes for gradients of which a rank has shards alone. Whoever reads one is told so.

torch's own clipping would else find no gradients, or those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from zreal import torch_private
from zsim.errors import ArgumentError


class ShardedGradient(Tensor):
    """A gradient without memory. Every operator on it raises ArgumentError."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise ArgumentError(
            where="the training loop",
            expected="a parameter.grad that nobody reads: zreal.ZeRO has shards of gradients",
            found=func.name(),
            remedy="clip by clip_norm= of zreal.ZeRO, in place of torch.nn.utils.clip_grad_norm_",
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return "<sharded by zreal.ZeRO>"


@dataclass(slots=True)
class ShardedGradients:
    """The substitutes of `parameters`, which are made once."""

    parameters: Iterable[nn.Parameter]
    _pairs: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    _hidden: list[Tensor | None] = field(default_factory=list)

    def show(self) -> None:
        """Backward is over: `grad` of each parameter is its substitute."""
        self._pairs = self._pairs or [
            (each, torch_private.without_memory(ShardedGradient, each)) for each in self.parameters
        ]
        self._hidden = [parameter.grad for parameter, _ in self._pairs]
        for parameter, gradient in self._pairs:
            parameter.grad = gradient

    def hide(self) -> None:
        """A forward or the end of the step comes: `grad` is what it was before its substitute."""
        for (parameter, gradient), own in zip(self._pairs, self._hidden, strict=False):
            if parameter.grad is gradient:
                parameter.grad = own
        self._hidden = []
