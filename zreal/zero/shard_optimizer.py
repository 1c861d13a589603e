"""The user's own optimizer, which steps this rank's shards in place of whole parameters.

Learning-rate schedulers keep working: the object and its param groups stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from zreal.executor.flat_buffers import FlatBuffers
from zreal.executor.rank_optimizer import RankOptimizer
from zreal.modules.optimizers import set_gradients, write_back
from zsim.errors import ArgumentError


@dataclass(slots=True, kw_only=True)
class ShardOptimizer(RankOptimizer):
    """The user's `torch_optimizer` over `stepped`: shards of parameters, or float32 master copies.

    A shard whose parameters lie in several of the optimizer's param groups is stepped in slices.
    """

    torch_optimizer: torch.optim.Optimizer
    param_group_of: Mapping[str, int]
    """Index of the optimizer's param group, by the parameter's fqn."""
    buffers: FlatBuffers
    scale: float
    """Share of this rank in the mean, as reductions sum."""
    _slices: list[tuple[str, int, int]] = field(default_factory=list)
    """Unit, start and length of what is stepped as one tensor, in the order of `_tensors`."""
    _tensors: list[Tensor] = field(default_factory=list)
    _stepping: bool = False

    def take_over(self) -> None:
        """Put the stepped tensors in place of the optimizer's parameters."""
        groups = self.torch_optimizer.param_groups
        members: list[list[Tensor]] = [[] for _ in groups]
        for unit, tensor in self.stepped.items():
            for index, start, length in self._cuts(unit, tensor.numel()):
                whole = length == tensor.numel()
                part = tensor if whole else tensor.narrow(0, start, length)
                self._slices.append((unit, start, length))
                self._tensors.append(part)
                members[index].append(part)
        for group, tensors in zip(groups, members, strict=True):
            group["params"] = tensors
        self.torch_optimizer.register_step_pre_hook(self._require_zero)

    def _cuts(self, unit: str, size: int) -> list[tuple[int, int, int]]:
        """Param group, start and length of each run of this rank's shard that lies in one param
        group; padding belongs to the last."""
        flat, first = self.buffers.groups[unit], self.buffers.process_group.rank() * size
        sizes = [
            (self.param_group_of[parameter.fqn], parameter.numel)
            for parameter in flat.group.parameters
        ]
        cuts, end = list[tuple[int, int, int]](), 0
        runs = [
            (index, sum(numel for _, numel in run))
            for index, run in groupby(sizes, key=lambda pair: pair[0])
        ]
        for number, (index, numel) in enumerate(runs):
            start, end = end, end + numel
            if number == len(runs) - 1:
                end = flat.layout.padded_numel
            low, high = max(start, first), min(end, first + size)
            if low < high:
                cuts.append((index, low - first, high - low))
        return cuts

    def mean(self) -> None:
        """Make means of this rank's summed gradients."""
        for unit in self.stepped:
            self.buffers.gradient(unit).mul_(self.scale)

    def step(
        self, gradients: Mapping[str, Tensor | None], parameters: Mapping[str, Tensor]
    ) -> None:
        """Step every shard, and cast stepped master copies into `parameters`."""
        handed = [_part(gradients[unit], start, length) for unit, start, length in self._slices]
        set_gradients(self.settings, self._tensors, handed)
        self._stepping = True
        self.torch_optimizer.step()
        self._stepping = False
        targets = [_part(parameters[unit], start, length) for unit, start, length in self._slices]
        write_back(self.settings, targets, self._tensors)

    def _require_zero(self, *_: Any) -> None:
        if not self._stepping:
            raise ArgumentError(
                where="optimizer", expected="zero.step(), which reduces and gathers too",
                found="optimizer.step()", remedy="call zero.step() in the loop",
            )


def _part(tensor: Tensor | None, start: int, length: int) -> Tensor:
    assert tensor is not None
    return tensor if length == tensor.numel() else tensor.narrow(0, start, length)
