"""Offloaded shards of one rank in host memory: float32 copies, their gradients, and what returns to
the device. On a CPU the host's tensors are apart from the device's by their role alone.

Buffers bear the Program's names, as in `zreal.executor.flat_buffers`. The Program says when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zreal.executor.rank_optimizer import RankOptimizer
from zreal.modules.initial_values import DTYPES
from zsim.ir.buffers import buffer_of, role_of
from zsim.ir.ops import HostAlloc, Op
from zsim.models.training_options import Dtype, Offload
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.flat_buffer.host_buffers import sent_back


@dataclass(slots=True)
class HostShards:
    """The host memory of one rank, by the Program's names."""

    offload: Offload
    dtype: Dtype
    """The dtype of parameters."""
    optimizer: RankOptimizer
    uncounted: Callable[[], AbstractContextManager[None]]
    """Around what is allocated here: on a CPU the meter takes it for the device's."""
    pins: bool = False
    """Pinned memory is to be had: the device is a GPU."""
    live: dict[str, Tensor] = field(default_factory=dict)

    def make_buffers(self, op: Op) -> None:
        """Make buffers of no group; there are none here."""

    def move(self, op: Op) -> None:
        """Read or write drives; there are none here."""

    def crossed(self, unit: str) -> None:
        """A shard of parameters is on the device."""

    def construct(self, op: Op, exact: Tensor, rounded: Tensor, *, trained: bool) -> None:
        """Make a group's buffers, those of parameters from its float32 shard and its rounded one.
        """
        sources = {"master": exact, "staging": rounded, "parameters": rounded}
        with self.uncounted():
            for event in op.host:
                if not isinstance(event, HostAlloc):
                    continue
                source = sources.get(role_of(event.buffer))
                made = torch.zeros(
                    exact.numel(), dtype=exact.dtype if source is None else source.dtype,
                    pin_memory=event.pinned and self.pins,
                )
                if source is not None:
                    made.copy_(source)
                self.live[event.buffer] = made
        if trained and buffer_of(op.unit, "master") in self.live:
            self.optimizer.stepped[op.unit] = self.live[buffer_of(op.unit, "master")]

    def gradient(self, unit: str) -> Tensor:
        """The float32 gradient of a group's shard."""
        return self.live[buffer_of(unit, "gradient")]

    def take_gradient(self, unit: str, gradient: Tensor) -> None:
        """Copy a gradient from the device, cast there where it is not float32."""
        exact = gradient.to(DTYPES[MASTER_DTYPE])
        self.gradient(unit).copy_(exact, non_blocking=self.pins)

    def parameters(self, unit: str) -> Tensor:
        """The shard in the dtype of compute, as it goes to the device."""
        name = buffer_of(unit, sent_back(self.offload, dtype=self.dtype) or "master")
        return self.live[name] if name in self.live else self.live[buffer_of(unit, "parameters")]

    def step(self, unit: str) -> None:
        """Step one group, and round what is stepped."""
        with self.uncounted():
            self.optimizer.step({unit: self.gradient(unit)}, {unit: self.parameters(unit)})

    def gradients(self) -> Mapping[str, Tensor]:
        """The gradients of all groups."""
        return {unit: self.gradient(unit) for unit in self.optimizer.stepped}

    def nbytes(self) -> int:
        """Bytes of all buffers here, and of the optimizer's states."""
        tensors = [*self.live.values(), *self.optimizer.states()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
