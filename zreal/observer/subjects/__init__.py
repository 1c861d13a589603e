"""Builds torch's own strategies around a model, one file each, so that the observer can train them.

A subject must not know the meter or the recorder. To add one, write a file with
`build(scenario, model, mesh, make)`, which wraps the model and makes its optimizer, and add a line
to table.py. `make` gives parameters their memory, as late as the strategy can have it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zreal.modules.initial_values import Make
from zreal.modules.modules import Model
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A wrapped module with its optimizer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    micro_batch: Callable[[bool], AbstractContextManager[None]]
    """Context around the forwards and backward of one micro-batch, the step's last or not. It
    reduces gradients or skips the reduction; in the last it reduces."""
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    """Runs the backward of a micro-batch from its loss."""
    states: Callable[[], list[torch.Tensor]]
    """The optimizer's tensors on this rank, master copies included."""
    owns_gradients: bool = True
    """True where gradients have memory of their own, instead of being views of buckets."""
    dtype: str = "float32"
    """The dtype of floating-point inputs of the module."""
    masters: tuple[torch.Tensor, ...] = ()
    """Copies of the parameters, in their order, that the optimizer steps; empty where it steps the
    parameters themselves."""
    flat: Callable[[], list[torch.Tensor]] = list
    """FSDP1's flat parameters, whose padding no parameter shows."""
    gradients: Callable[[], list[torch.Tensor]] = list
    """Gradients that are no parameter's own."""
    clip: Callable[[float], object] | None = None
    """Clips gradients by their global norm; None for torch.nn.utils.clip_grad_norm_."""
    whole: Callable[[str], dict[str, torch.Tensor]] | None = None
    """Gathers whole "parameters" or "gradients" by the model's fqns, on all ranks; None where they
    are DTensors or whole already."""


Build = Callable[[Scenario, Model, DeviceMesh, Make], Subject]
