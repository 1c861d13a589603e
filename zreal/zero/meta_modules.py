"""Modules on the meta device: their parameters get memory and values one param group at a time.

Rank 0 makes the values, by `reset_parameters()` or from a state dict, and broadcasts them. Under
stage 3 no rank thus ever holds more than its shards and one param group whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zreal.modules.initial_values import fill
from zsim.errors import ArgumentError


def is_meta(module: nn.Module) -> bool:
    """True where any parameter or buffer of `module` has no memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@dataclass(slots=True, kw_only=True)
class MetaModule:
    """A module that is made real group by group on `device`; `state` of rank 0 has its values."""

    module: nn.Module
    device: torch.device
    group: dist.ProcessGroup
    state: Mapping[str, Tensor] | None = None
    _done: set[str] = field(default_factory=set)
    """Modules whose parameters and buffers are real."""

    def require_values(self) -> None:
        """ArgumentError for a tensor that neither a state nor its module gives a value."""
        if self.group.rank() == 0 and self.state is not None:
            saved = self.module.state_dict().keys()
            for fqn in self._names():
                if fqn not in self.state and fqn not in saved:  # a buffer that is not persistent
                    self._require_reset(fqn, "give its value in state= too")
                    continue
                if fqn not in self.state:
                    raise ArgumentError(
                        where="state", expected=f"a value of {fqn}", found="none",
                        remedy="give the whole module's state_dict(), on rank 0 alone",
                    )
                tensor = self._tensor(fqn)
                if self.state[fqn].shape != tensor.shape:
                    raise ArgumentError(
                        where=f"state {fqn}", expected=f"the shape {tuple(tensor.shape)}",
                        found=str(tuple(self.state[fqn].shape)),
                    )
        elif self.group.rank() == 0:
            for fqn in self._names():
                self._require_reset(fqn, "give state= on rank 0")

    def _require_reset(self, fqn: str, otherwise: str) -> None:
        """ArgumentError where the module of `fqn` cannot make its values."""
        owner = self.module.get_submodule(fqn.rpartition(".")[0])
        if not callable(getattr(owner, "reset_parameters", None)):
            raise ArgumentError(
                where=fqn, expected="a module that can be made on the meta device",
                found=f"{type(owner).__name__}, which has no reset_parameters()",
                remedy="add one that fills its own parameters and buffers, "
                       f"{otherwise}, or make the module with real tensors",
            )

    def make_buffers(self) -> None:
        """Make modules real that have buffers: the first forward needs these whole."""
        self._make(fqn.rpartition(".")[0] for fqn, _ in self.module.named_buffers())

    def make(self, parameters: Iterable[str]) -> None:
        """Make the modules real that own `parameters`."""
        self._make(fqn.rpartition(".")[0] for fqn in parameters)

    def _make(self, owners: Iterable[str]) -> None:
        for path in dict.fromkeys(owners):
            if path not in self._done:
                self._done.add(path)
                self._make_one(path)

    def _make_one(self, path: str) -> None:
        """Memory on every rank, values on rank 0, and their broadcast."""
        owner, values = self.module.get_submodule(path), dict[str, Tensor]()
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=self.device)
                values[name] = fill(self.module, parameter, empty).data
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                values[name] = torch.empty_like(buffer, device=self.device)
                setattr(owner, name, values[name])
        if self.group.rank() == 0:
            self._fill(owner, values, f"{path}." if path else "")
        for tensor in values.values():
            dist.broadcast(tensor, group=self.group, group_src=0)

    def _fill(self, owner: nn.Module, values: Mapping[str, Tensor], prefix: str) -> None:
        with torch.no_grad():
            state = self.state or {}
            if any(prefix + name not in state for name in values):
                owner.reset_parameters()  # type: ignore[operator]
            for name, tensor in values.items():
                if prefix + name in state:
                    tensor.copy_(state[prefix + name])

    def _names(self) -> list[str]:
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return [fqn for fqn, tensor in named if tensor.is_meta]

    def _tensor(self, fqn: str) -> Tensor:
        path, _, name = fqn.rpartition(".")
        tensor: Tensor = getattr(self.module.get_submodule(path), name)
        return tensor
