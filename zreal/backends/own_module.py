"""A scenario with the user's own module in place of its model."""

from __future__ import annotations

from zreal.backends.requirements import require_torch
from zsim.models.training_options import Device
from zsim.scenario.scenario import Scenario


def traced_with_module(
    scenario: Scenario, module: str, *, backend: str, device: Device, timeout_s: float
) -> Scenario:
    """The scenario with the module called `module`, traced for the device."""
    require_torch(backend)
    from zreal.modules.own.user_code import within
    from zreal.tracing.own_scenario import with_module

    with within(timeout_s, module):
        return with_module(scenario, module, device=device)
