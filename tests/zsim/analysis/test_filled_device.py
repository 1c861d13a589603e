"""The verdict on a simulated Run's device is that of its Program, which nothing plans again."""

from __future__ import annotations

import pytest

from tests.support.folders import ROOT
from zsim import api
from zsim.analysis.simulated_step import device_memory
from zsim.runs.backend import RunOptions
from zsim.runs.real_run import observe
from zsim.scenario import plan
from zsim.scenario.scenario import Scenario, load


def planned_again(scenario: Scenario) -> None:
    raise AssertionError(scenario.name)


@pytest.mark.parametrize("changes", [
    {}, {"model": {"num_layers": 8}}, {"batch": {"micro_batch": 4}},
    {"faults": [{"kind": "slow_rank", "rank": 0, "factor": 2.0}]},
])
def test_a_simulated_step_and_the_verdict_on_its_device_have_one_program(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = load(ROOT / "scenarios/published/llama-3-8b-8-h100.toml").with_(**changes)
    options = RunOptions()
    backend, capabilities = api.open_backend("sim", options)
    record = observe(backend, capabilities, scenario, options)
    alone = device_memory(scenario, record)
    monkeypatch.setattr(plan, "planned", planned_again)
    assert alone is not None
    assert device_memory(scenario, record, backend) == alone
