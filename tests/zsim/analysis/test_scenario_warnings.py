"""Warnings before a run that costs or does more than its user may think."""

from __future__ import annotations

import pytest

from zsim.analysis.scenario_warnings import caveats
from zsim.scenario.scenario import Scenario, parse


def cautions(scenario: Scenario) -> tuple[str, ...]:
    """The texts of a scenario's caveats."""
    return tuple(caveat.text for caveat in caveats(scenario))


@pytest.mark.parametrize(("strategy", "parameters", "optimizer", "warned"), [
    ("zero_redundancy", "fp16", "adamw", True), ("zero_redundancy", "bf16", "adamw", False),
    ("zero_redundancy", "fp16", "sgd", False), ("ddp", "fp16", "adamw", False),
    ("fsdp2", "fp16", "adamw", False),
])
def test_who_lets_adamw_step_fp16_is_warned(
    strategy: str, parameters: str, optimizer: str, warned: bool
) -> None:
    """torch's own training leaves all bounds there: validate finds numerics that differ, and
    nothing is wrong with the strategy."""
    text = (
        'model = { preset = "mlp-tiny" }\nbatch = { micro_batch = 1 }\ncluster = { preset = '
        '"cpu-gloo", ranks = 2 }\n'
        f'strategy = {{ name = "{strategy}" }}\nprecision = {{ parameters = "{parameters}" '
        f'}}\noptimizer = {{ name = "{optimizer}" }}\n'
    )
    lines = cautions(parse(text.encode(), where="half.toml"))
    warnings = [line for line in lines if "fp16" in line]
    assert bool(warnings) is warned
    assert all(line.startswith("adamw steps fp16 parameters, without a master copy in "
                               "zero_redundancy") for line in warnings)
