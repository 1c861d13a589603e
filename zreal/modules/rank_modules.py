"""Modules that compute every rank's part of a step in one process.

They have the same parameters. A user's own module may keep more than these from one forward to the
next: buffers, or counters of its own. So each rank has a module of its own there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from zreal.modules import modules
from zreal.modules.initial_values import fill
from zreal.modules.own.own_module import OwnModel
from zsim.scenario.scenario import Scenario


@dataclass(kw_only=True)
class RankModules:
    """The modules of all ranks of `scenario`, with parameters in `dtype` on `device`.

    With `wide` parameters and buffers are in float64, rounded to `dtype` before.
    """

    scenario: Scenario
    dtype: str
    device: str = "cpu"
    synchronised: Collection[int] = ()
    """Micro-batches before whose forward every rank takes rank 0's buffers, as under DDP."""
    wide: bool = False
    _rank_0s: dict[int, list[Tensor]] = field(init=False, default_factory=dict)
    """Rank 0's buffers before each of these micro-batches."""

    @cached_property
    def first(self) -> modules.Model:
        """The module of rank 0, whose gradients are those of all ranks."""
        spec, seed = self.scenario.model, self.scenario.seed
        model = modules.build(spec, seed=seed, dtype=self.dtype)
        return self._completed(model)

    @cached_property
    def each(self) -> list[modules.Model]:
        """The modules by rank; a single one for all where forward keeps nothing."""
        is_own = isinstance(self.scenario.model, OwnModel)
        others = range(1, self.scenario.world_size if is_own else 1)
        return [self.first, *(self._another() for _ in others)]

    def _another(self) -> modules.Model:
        """A module like the first one, over the same parameters."""
        model = modules.empty(self.scenario.model, seed=self.scenario.seed, dtype=self.dtype)
        pairs = zip(list(model.parameters()), self.first.parameters(), strict=True)
        for own, shared in pairs:
            if own.is_meta:
                fill(model, own, shared.data)
            else:
                own.data = shared.data
        return self._completed(model)

    def _completed(self, model: modules.Model) -> modules.Model:
        """`model` on the device, its buffers in the dtype that they have in a real run."""
        modules.cast_buffers(model, self.scenario)
        model.to(self.device)
        return model.double() if self.wide else model

    @torch.no_grad()
    def take(self, exact: nn.Module) -> None:
        """Give all modules the parameters of `exact`, rounded, and no gradients."""
        for own, other in zip(self.first.parameters(), exact.parameters(), strict=True):
            own.copy_(other)
        self.first.zero_grad(set_to_none=True)

    @torch.no_grad()
    def take_buffers(self, by_rank: Sequence[Sequence[Tensor]]) -> None:
        """Give the module of each rank that is told buffers of these values."""
        for model, values in zip(self.each, by_rank, strict=False):
            for buffer, value in zip(model.buffers(), values, strict=True):
                buffer.copy_(value)

    @contextmanager
    def of(self, rank: int) -> Iterator[modules.Model]:
        """The module of `rank`. Gradients that it gets inside are added to the first one's."""
        model = self.each[rank % len(self.each)]
        pairs = list(zip(self.first.parameters(), model.parameters(), strict=True))
        for shared, own in pairs:
            own.grad = shared.grad
        yield model
        for shared, own in pairs:
            shared.grad = own.grad
            own.grad = own.grad if own is shared else None

    @torch.no_grad()
    def before_forward(self, rank: int, *, micro_batch: int) -> None:
        """Give the module of `rank` rank 0's buffers, where ranks synchronise them."""
        if micro_batch not in self.synchronised:
            return
        buffers = list(self.each[rank % len(self.each)].buffers())
        if rank == 0:
            self._rank_0s[micro_batch] = [buffer.clone() for buffer in buffers]
        for buffer, rank_0s in zip(buffers, self._rank_0s[micro_batch], strict=True):
            buffer.copy_(rank_0s)
