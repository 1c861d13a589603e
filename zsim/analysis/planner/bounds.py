"""Bounds of a candidate that need no Program: bytes that it has at least, and nanoseconds that it
takes at least. What they rule out need not be simulated.

Both are proved: every parameter, gradient and optimizer state lives when the optimizer steps, and
no kernel is faster than its device's peak.
"""

from __future__ import annotations

from zsim.engine.costs.kernel_time import multiplied_in
from zsim.memory.waterfall import formula_bytes
from zsim.scenario.plan import training
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES


def least_bytes(scenario: Scenario) -> int:
    """Bytes of states on the device of one rank; 0 where some are kept elsewhere."""
    if scenario.offload.states or STRATEGIES[scenario.strategy].offloads(scenario.options):
        return 0
    return formula_bytes(scenario)


def least_ns(scenario: Scenario) -> int:
    """Nanoseconds of one rank's products and attention at the peak of its device."""
    device, executed = scenario.cluster.device, scenario.executed
    modules = training(scenario, device=scenario.cluster.kind).modules
    seconds = 0.0
    for module in modules:
        for kernel in (*module.forward.kernels, *module.backward.kernels, *module.recompute):
            if kernel.shape:
                seconds += kernel.flops / device.peak_flops(multiplied_in(kernel, executed))
    return int(1e9 * seconds * scenario.batch.accumulation)
