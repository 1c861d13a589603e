"""A strategy's input: the lowered model and the choices that every strategy shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from zsim.autograd.lowered import LoweredModule
from zsim.ir.ops import Free
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import ModelSpec, ParamGroup
from zsim.models.torch_versions import NEWEST, TorchVersion
from zsim.models.training_options import (
    ON_DEVICE,
    Batch,
    Device,
    Offload,
    Optimizer,
    Precision,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The input of `strategies.*.plan(training, mesh=…, options=…)`. It holds no time."""

    model: ModelSpec
    modules: tuple[LoweredModule, ...]
    batch: Batch
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sync: Literal["every", "last"] = "every"
    device: Device = "cuda"
    checkpointing: Checkpointing = NO_CHECKPOINTING
    """Blocks and operators that `modules` recompute."""
    torch: TorchVersion = NEWEST
    """The torch whose steps torch's own strategies follow."""
    gradients: str = ""
    """Dtype of the buffers that gradients are added into; "" for that of parameters."""
    offload: Offload = ON_DEVICE
    """States that live in host memory."""
    devices_per_node: int = 0
    """Devices of each of several nodes; 0 where all ranks are in one."""

    @property
    def forwards(self) -> tuple[tuple[LoweredModule, ...], ...]:
        """The modules, forward by forward; more than one where several come before a backward."""
        size = len(self.modules) // self.model.forwards
        return tuple(
            self.modules[start : start + size] for start in range(0, len(self.modules), size)
        )

    @property
    def freed_with_autocast_cache(self) -> tuple[Free, ...]:
        """Frees of autocast's cache, when the forward of the whole model is over."""
        return tuple(event for module in self.modules for event in module.freed_with_autocast_cache)

    @property
    def backward_modules(self) -> tuple[LoweredModule, ...]:
        """The modules that run backward, in its order: all but those before the first parameter
        that needs a gradient."""
        return tuple([module for module in self.modules[::-1] if module.differentiates])

    @property
    def last_of_backward(self) -> LoweredModule:
        """The module whose backward is the last."""
        return next(module for module in self.modules if module.differentiates)

    def unit(self, fqn: str) -> ParamGroup:
        """The param group called `fqn`."""
        return next(unit for unit in self.model.units if unit.fqn == fqn)
