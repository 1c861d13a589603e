"""How to build the real thing that a strategy models, one file each. To add one, add a file and a
line.

A subject is made by `build(scenario, model, mesh)`, which wraps the model and makes its optimizer.
Its `micro_batch(last)` is a context around one forward and backward, in which gradients are
synchronised or not; in the step's last one they always are. The table is in table.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zreal.modules.modules import Model
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A wrapped module with its optimizer. `micro_batch(last)` is entered around one forward and
    backward."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    micro_batch: Callable[[bool], AbstractContextManager[None]]
    states: Callable[[], list[torch.Tensor]]
    """What the optimizer keeps on this rank, master copies included."""
    owns_gradients: bool = True
    """Whether gradients have memory of their own, rather than being views of buckets."""
    dtype: str = "float32"
    """The dtype in which a floating-point input is handed to the module."""
    masters: tuple[torch.Tensor, ...] = ()
    """Copies of the parameters, in their order, that the optimizer steps in their place; none where
    it steps the parameters."""
    flat: Callable[[], list[torch.Tensor]] = list
    """What its parameters are views of, where that has padding of its own."""
    clip: Callable[[float], object] | None = None
    """Its own way to clip gradients by their global norm; None for torch.nn.utils.clip_grad_norm_.
    """
    whole: Callable[[str], dict[str, torch.Tensor]] | None = None
    """Its own way to gather the "parameters" or "gradients" of the model, whole and by the model's
    fqns; a collective of all ranks."""


Build = Callable[[Scenario, Model, DeviceMesh], Subject]
