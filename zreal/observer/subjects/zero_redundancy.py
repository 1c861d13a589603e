"""torch's ZeroRedundancyOptimizer of the parameters of a DDP module."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zreal.meters.held_memory import state_tensors
from zreal.modules.initial_values import Make
from zreal.modules.modules import Model
from zreal.modules.optimizers import EPSILON, trained
from zreal.observer.subjects import Subject, ddp
from zsim.models.training_options import Optimizer
from zsim.scenario.scenario import Scenario


def build(scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make) -> Subject:
    """`model` under DDP. torch assigns whole parameters to ranks greedily, and steps their dtype.
    """
    # compiles optimizers as it is imported, which takes a third of a second
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp.make_whole(scenario, make)
    module = ddp.wrap(scenario, model, mesh)
    kind, defaults = optimizer_class(scenario.optimizer)
    optimizer = ZeroRedundancyOptimizer(
        trained(module), optimizer_class=kind, process_group=mesh.get_group(), **defaults
    )
    return Subject(
        module=module,
        optimizer=optimizer,
        micro_batch=lambda last: ddp.synchronised(module, last or scenario.sync == "every"),
        states=lambda: state_tensors(optimizer.optim),
        owns_gradients=not scenario.options.gradient_as_bucket_view,
        dtype=scenario.precision.parameters,
    )


def optimizer_class(settings: Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of torch.optim and its arguments, as in `zreal.modules.optimizers.make_optimizer`.
    """
    common = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "foreach": settings.implementation == "foreach",
        "fused": settings.implementation == "fused",
    }
    if settings.name == "adamw":
        return torch.optim.AdamW, common | {"eps": EPSILON}
    return torch.optim.SGD, common | {"momentum": settings.momentum}
