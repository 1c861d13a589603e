"""From a scenario to its Program: the model is lowered for batch, dtype and device, and the strategy arranges it."""

from __future__ import annotations

from zsim import lowering
from zsim import training as kinds
from zsim.eager_sdpa import without_kernel
from zsim.errors import ScenarioError
from zsim.program import Program
from zsim.repeats import with_forwards
from zsim.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.training import DTYPE_NBYTES, Device


def training(scenario: Scenario, *, device: Device) -> kinds.Training:
    """What the strategy is given: the scenario's model lowered for `device`, and the scenario's choices."""
    dtype = scenario.precision.parameters
    casts_input = STRATEGIES[scenario.strategy].casts_input and dtype != "float32"
    _require_kernels(scenario, device=device)
    model = with_forwards(scenario.model, scenario.batch.forwards)
    modules = lowering.lower(
        model,
        batch=scenario.batch,
        dtype=dtype,
        casts_input=casts_input,
        device=device,
        checkpointing=scenario.checkpointing,
        autocast=scenario.precision.autocast,
    )
    return kinds.Training(
        model=model,
        modules=modules,
        batch=scenario.batch,
        precision=scenario.precision,
        optimizer=scenario.optimizer,
        sync=scenario.sync,
        device=device,
    )


def _require_kernels(scenario: Scenario, *, device: Device) -> None:
    """ScenarioError where the attention that is asked for does not run on `device`, which need not be the scenario's own."""
    nbytes = DTYPE_NBYTES[scenario.precision.products]
    attentions = (op for module in scenario.model.modules for op in module.operators if op.kind == "attention")
    for why in filter(None, (without_kernel(op, device=device, nbytes=nbytes) for op in attentions)):
        raise ScenarioError((f'{scenario.name}: model.attention: {why}; "sdpa" takes a kernel that there is',))


def plan(scenario: Scenario, *, device: Device) -> Program:
    """The Program of the scenario's strategy on its mesh; a ZsimError where its options do not fit."""
    strategy = STRATEGIES[scenario.strategy]
    return strategy.plan(training(scenario, device=device), mesh=scenario.mesh, options=scenario.options)
