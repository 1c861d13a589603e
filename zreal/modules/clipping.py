"""Clipping of sharded gradients in torch's arithmetic: a norm per gradient, an all-reduce of the
squares, one coefficient for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm by torch.nn.utils.clip_grad_norm_."""


@dataclass(slots=True)
class Clipping:
    """The clipping of one step, in the three ops of a Program: norms, their all-reduce, the
    scaling."""

    norms: list[Tensor] = field(default_factory=list)
    stack: Tensor | None = None
    squares: Tensor | None = None
    reduced: Tensor | None = None
    total: Tensor | None = None

    def measure(self, gradients: Sequence[Tensor], *, sharded: bool) -> None:
        """The norm of each of this rank's gradients; their total too, unless they are `sharded`."""
        self.norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        self.stack = torch.stack(self.norms)
        if sharded:
            self.squares = self.stack.pow(2)
        else:
            self._sum(self.stack)

    def reduce(self, group: dist.ProcessGroup, *, device: str | torch.device) -> None:
        """Sum the squares over `group` on `device`, out of place."""
        assert self.squares is not None
        reduced = self.squares.to(device, copy=True)
        dist.all_reduce(reduced, group=group)
        self.reduced = reduced.to(self.squares.device)

    def clip(self, gradients: Sequence[Tensor], *, max_norm: float) -> None:
        """Scale `gradients` in place so that their joint norm is at most `max_norm`."""
        if self.reduced is not None:
            roots = self.reduced.pow(0.5)
            self.squares = self.reduced = None
            self._sum(roots)
            del roots
        coefficient = torch.clamp(max_norm / (self._take() + EPSILON), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)

    def _sum(self, norms: Tensor) -> None:
        self.total = torch.linalg.vector_norm(norms)
        self.stack, self.norms = None, []

    def _take(self) -> Tensor:
        assert self.total is not None
        return self.total
