"""Initial values of parameters and inputs, from the seed and their names alone.

Every rank and strategy therefore starts with the same numbers. A model on the meta device gets them
one param group at a time, so that a rank that shards never holds it whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from zsim.errors import ZsimError
from zsim.models.spec import ModelSpec, Parameter

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16
}


def generator_of(*key: int | str) -> torch.Generator:
    """A generator seeded by the whole `key`, hashed to the 32 bits that torch's CPU generator uses.
    """
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def initial(parameter: Parameter, *, seed: int) -> Tensor:
    """Initial value of `parameter` in float32, from the seed and its fqn alone."""
    generator = generator_of(seed, parameter.fqn)
    if len(parameter.shape) == 1:
        centre = 1.0 if parameter.fqn.endswith("weight") else 0.0
        return centre + 0.02 * torch.randn(parameter.shape, generator=generator)
    scale: float = min(0.1, parameter.shape[-1] ** -0.5)
    return torch.randn(parameter.shape, generator=generator) * scale


Make = Callable[[Iterable[str]], None]
"""Gives parameters of a model, by fqn, memory and values on the rank's device."""


def made(_: Iterable[str]) -> None:
    """Parameters that have their memory and values already."""


class Meter(Protocol):
    """The meter of the run's memory."""

    def uncounted(self) -> AbstractContextManager[None]: ...
    def watch(self, *tensors: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialiser:
    """Makes parameters of `model` on `device`, once each. Those on the meta device are drawn by the
    seed, or by the user's own code; others are moved there."""

    model: nn.Module
    spec: ModelSpec
    seed: int
    device: str
    meter: Meter
    value: Callable[[str], Tensor] | None = None
    """The values of a parameter by the user's own code, by fqn."""
    _made: set[str] = field(default_factory=set)

    def __call__(self, fqns: Iterable[str]) -> None:
        """Make the parameters `fqns` whole."""
        drawn = {parameter.fqn: parameter for parameter in self.spec.parameters}
        for fqn in fqns:
            if fqn in self._made:
                continue
            self._made.add(fqn)
            parameter = self.model.get_parameter(fqn)
            if parameter.is_meta:
                with self.meter.uncounted():  # random numbers are not the strategy's
                    value = (
                        initial(drawn[fqn], seed=self.seed) if self.value is None
                        else self.value(fqn)
                    )
                empty = torch.empty_like(parameter, device=self.device)
                parameter = fill(self.model, parameter, empty.detach().copy_(value))
                del value, empty
            else:
                value = parameter.data.to(self.device)
                is_part = value.nbytes < value.untyped_storage().nbytes()
                parameter.data = value.clone() if is_part else value
            self.meter.watch(parameter)


def fill(model: nn.Module, meta: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter of `value` in place of `meta`, wherever `model` has it: ties stay."""
    real = nn.Parameter(value, requires_grad=meta.requires_grad)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is meta:
                module.register_parameter(name, real)
    return real


def move_buffers(model: nn.Module, device: str) -> None:
    """Move the buffers of `model` to `device`; its parameters stay where they are."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def copies_of_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers of `model` as they are now, in host memory."""
    return [buffer.detach().to("cpu", copy=True) for buffer in model.buffers()]


def by_unit(spec: ModelSpec) -> dict[str, list[str]]:
    """The fqns of the parameters of each unit."""
    return {unit.fqn: [parameter.fqn for parameter in unit.parameters] for unit in spec.units}


class ModelError(ZsimError):
    """A model whose torch module cannot be built."""
