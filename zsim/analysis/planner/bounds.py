"""Lower bounds of a candidate's bytes and nanoseconds, computed without a Program. Candidates that
they rule out are not planned.

They are proved. Every parameter, gradient and optimizer state lives when the optimizer steps.
Tensors saved for backward live when forward ends, and parameters and optimizer states then too. And
a step has all kernels of forward and backward, one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.engine.costs.op_costs import Costs
from zsim.ir.ops import Alloc, Free
from zsim.memory.waterfall import formula_bytes
from zsim.scenario.plan import training
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.training import Training


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least that a rank's device holds at its peak, and the least that a step takes. `kept`:
    activations among those bytes."""

    nbytes: int
    ns: int
    kept: int


def bounds_of(scenario: Scenario) -> Bounds:
    """The bounds of a candidate; 0 bytes where some states are kept elsewhere than on the device.
    """
    lowered = training(scenario, device=scenario.cluster.kind)
    ns = _least_ns(lowered, scenario)
    if scenario.offload.states or STRATEGIES[scenario.strategy].offloads(scenario.options):
        return Bounds(0, ns, 0)
    kept = 0 if scenario.offload.saving else _kept_bytes(lowered)
    in_forward = formula_bytes(scenario, gradients=False) + kept
    at_the_end = formula_bytes(scenario)
    return (
        Bounds(in_forward, ns, kept) if in_forward > at_the_end else Bounds(at_the_end, ns, 0)
    )


def _kept_bytes(lowered: Training) -> int:
    """Bytes of activations that live when the last module's forward is over."""
    live: dict[str, int] = {}
    for module in lowered.modules:
        for event in module.forward.memory:
            if type(event) is Alloc:
                live[event.buffer] = event.nbytes
            elif type(event) is Free:
                live.pop(event.buffer, None)
        for event in module.freed_with_autocast_cache:
            live.pop(event.buffer, None)
        for buffer in module.caller_frees:
            live.pop(buffer, None)
    return sum(live.values())


def _least_ns(lowered: Training, scenario: Scenario) -> int:
    """Nanoseconds of the kernels of forward and backward, alone on the device."""
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    return scenario.batch.accumulation * sum(
        costs.compute_ns(kernels)
        for module in lowered.modules
        for kernels in (module.forward.kernels, module.recompute, module.backward.kernels)
    )
