"""Planning: the model is lowered for batch, dtype and device, and the strategy arranges it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zsim.autograd.aten.sdpa import kernel_problem
from zsim.autograd.lowering import lower_model
from zsim.errors import ScenarioError
from zsim.ir.gc_pause import uncollected
from zsim.ir.program import Program
from zsim.models.repeats import with_forwards
from zsim.models.torch_versions import NEWEST, TorchVersion
from zsim.models.training_options import Device
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.training import Training


@dataclass(frozen=True, slots=True)
class Planned:
    """A scenario and its Program for its own cluster's device: made once, and handed along."""

    scenario: Scenario
    program: Program


def planned(scenario: Scenario) -> Planned:
    """The scenario with its Program; raises what `plan` raises."""
    return Planned(scenario, plan(scenario, device=scenario.cluster.kind))


_lowered = lru_cache(maxsize=16)(lower_model.lower)
"""Lowered modules of the last few models: strategies that are compared share most of them."""


def training(
    scenario: Scenario, *, device: Device, torch: TorchVersion = NEWEST
) -> Training:
    """The strategy's input: the scenario's model lowered for `device`, and the scenario's choices.
    """
    strategy, cluster = STRATEGIES[scenario.strategy], scenario.cluster
    missing = kernel_problem(scenario.model, scenario.precision, device=device)
    if missing:  # on another device than the scenario's own
        raise ScenarioError((f"{scenario.name}: {missing}",))
    model = with_forwards(scenario.model, scenario.batch.forwards)
    modules = _lowered(
        strategy.differentiates(model),
        batch=replace(scenario.batch, accumulation=1),  # all micro-batches are lowered alike
        dtype=scenario.precision.parameters,
        casts_input=strategy.casts(scenario.precision),
        device=device,
        checkpointing=scenario.checkpointing,
        autocast=scenario.precision.autocast,
        unit_hooks=strategy.unit_hooks,
        saving=scenario.offload.saving,
    )
    return Training(
        model=model,
        modules=modules,
        batch=scenario.batch,
        precision=scenario.precision,
        optimizer=scenario.optimizer,
        sync=scenario.sync,
        device=device,
        checkpointing=scenario.checkpointing,
        torch=torch,
        gradients=scenario.gradient_dtype,
        offload=scenario.offload,
        devices_per_node=cluster.devices_per_node if cluster.num_nodes > 1 else 0,
    )


@uncollected()
def plan(scenario: Scenario, *, device: Device, torch: TorchVersion = NEWEST) -> Program:
    """The Program of the scenario's strategy on its mesh, as that torch does it; a ZsimError where
    its options do not fit."""
    strategy = STRATEGIES[scenario.strategy]
    trained = training(scenario, device=device, torch=torch)
    try:
        return strategy.plan(trained, mesh=scenario.mesh, options=scenario.options)
    except ScenarioError as error:  # a strategy does not know the scenario's name
        problems = tuple(f"{scenario.name}: {problem}" for problem in error.problems)
        raise ScenarioError(problems) from error
