"""Flat buffers of one rank under zero1, zero2 and zero3, and the parameters that are views of them.

Buffers bear the Program's names, "unit:role". The roles are parameters (whole, or this rank's
shard), unsharded, master, gradients, gradient_shard, reduce_input and reduce_output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from zreal import torch_private
from zsim.ir.buffers import buffer_of
from zsim.strategies.flat_buffer.groups import FlatGroup


@dataclass(slots=True)
class FlatBuffers:
    """The live buffers of one rank by the Program's names, and where parameters lie in them."""

    groups: Mapping[str, FlatGroup]
    """Groups by unit."""
    model: nn.Module
    process_group: dist.ProcessGroup
    live: dict[str, Tensor] = field(default_factory=dict)

    def full(self, unit: str) -> Tensor:
        """The whole padded parameters of `unit`; without memory while they are resharded."""
        unsharded = buffer_of(unit, "unsharded")
        return self.live[unsharded if unsharded in self.live else buffer_of(unit, "parameters")]

    def shard(self, unit: str) -> Tensor:
        """This rank's parameters of `unit`: a buffer of their own, or a slice of the whole."""
        kept = self.live[buffer_of(unit, "parameters")]
        is_shard = kept.numel() == self.groups[unit].layout.shard_numel
        return kept if is_shard else self.own_slice(unit, kept)

    def gradient(self, unit: str) -> Tensor:
        """This rank's gradients of `unit`: a buffer of their own, or a slice of the whole."""
        shard = self.live.get(buffer_of(unit, "gradient_shard"))
        if shard is not None:
            return shard
        return self.own_slice(unit, self.live[buffer_of(unit, "gradients")])

    def own_slice(self, unit: str, full: Tensor) -> Tensor:
        """This rank's slice of a whole buffer of `unit`."""
        size = self.groups[unit].layout.shard_numel
        return full.narrow(0, self.process_group.rank() * size, size)

    def views(self, group: FlatGroup, full: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter of `group` with its view of the whole buffer `full`."""
        pieces = full[: group.layout.numel].split(list(group.layout.numels))
        return [
            (self.model.get_parameter(p.fqn), piece.view(p.shape))
            for p, piece in zip(group.group.parameters, pieces, strict=True)
        ]

    def with_memory(self) -> dict[str, bool]:
        """Names of the live buffers, True for those with memory."""
        return {name: tensor.untyped_storage().size() > 0 for name, tensor in self.live.items()}

    def gather(self, unit: str) -> None:
        """Make the parameters of `unit` whole."""
        full = self.full(unit)
        full.untyped_storage().resize_(full.numel() * full.element_size())
        torch_private.all_gather(full, self.shard(unit), group=self.process_group)

    def gathered(self, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Fqn of each parameter and its view of the unit all-gathered from the ranks' `shards`,
        one unit at a time."""
        for unit, shard in shards.items():
            group = self.groups[unit]
            full = self.full(unit).new_empty(group.layout.padded_numel, dtype=shard.dtype)
            own = shard.to(full.device)  # from the host, where it is offloaded
            torch_private.all_gather(full, own, group=self.process_group)
            views = self.views(group, full)
            for parameter, (_, view) in zip(group.group.parameters, views, strict=True):
                yield parameter.fqn, view


def release(tensor: Tensor) -> None:
    """Free a tensor's memory now, though gloo's threads may still hold a reference to it."""
    tensor.untyped_storage().resize_(0)
