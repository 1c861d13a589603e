"""`zsim fit` over scenarios of every strategy: it answers, and what it moves to another strategy
means the same there."""

from __future__ import annotations

import json

import pytest

from tests.support.cases.sampling import one_in
from tests.support.folders import PARITY, SCENARIOS
from zsim.analysis.alternatives import moved
from zsim.analysis.fit.fit import fit
from zsim.cli import main
from zsim.io.system import parallel
from zsim.ir.program import Program
from zsim.models.training_options import Device
from zsim.scenario import plan as plan_module
from zsim.scenario.scenario import Scenario, load, parse
from zsim.strategies import STRATEGIES

LLAMA = SCENARIOS / "overlap/fsdp2-llama-3-8b-8.toml"
FILES = [file.stem for file in sorted(PARITY.glob("*.toml"))]


@pytest.mark.parametrize(
    "name",
    [*one_in(5, [name for name in FILES if "fsdp1" not in name]), "fsdp1-mlp-2", "fsdp1-gpt-2x2"],
)
def test_every_kind_of_scenario_is_fitted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["fit", str(PARITY / f"{name}.toml"), "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["candidates"]


def test_options_that_mean_something_else_elsewhere_are_not_carried_over() -> None:
    """fsdp1's backward_prefetch is a word, fsdp2's a number."""
    assert (
        moved(load(PARITY / "fsdp1-gpt-4.toml"), "fsdp2").options == STRATEGIES["fsdp2"].options()
    )


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """Every scenario that is planned, in order."""
    seen, plan = list[Scenario](), plan_module.plan

    def counted(scenario: Scenario, *, device: Device) -> Program:
        seen.append(scenario)
        return plan(scenario, device=device)

    monkeypatch.setattr(plan_module, "plan", counted)
    monkeypatch.setattr(parallel, "_cores", lambda: 1)  # plans of other processes are not seen
    return seen


def test_fit_plans_each_candidate_once(plans: list[Scenario]) -> None:
    """Memory and step time are read off one Program."""
    fitted = fit(load(LLAMA))
    assert plans == [candidate.scenario for candidate in fitted.candidates]


def test_show_plans_the_scenario_once_and_each_change_but_those_of_the_allocator(
    plans: list[Scenario], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["show", "--memory", str(LLAMA), "--json"]) == 0
    effects = json.loads(capsys.readouterr().out)["what_would_help"]
    planned = [each for each in effects if not each["change"].startswith("allocator.")]
    assert len(planned) == len(effects) - 1
    assert len(plans) == 1 + len(planned)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_s_stages_stand_beside_those_of_the_ladder(stage: int) -> None:
    asked = load(PARITY / "zero2-mlp-2.toml").with_(
        strategy={"name": f"deepspeed{stage}"}, cluster={"preset": "dgx-a100", "ranks": 8}
    )
    ways = [candidate.name for candidate in fit(asked).candidates]
    assert f"deepspeed{stage}" in ways
    assert all("groups" not in way for way in ways if way.startswith("deepspeed"))


ALONE = """
model = { preset = "MODEL" }
batch = { micro_batch = 2, sequence_length = 1024 }
cluster = { preset = "pcie-box", device = "rtx-4090-24", ranks = 1 }
strategy = { name = "NAME" }
precision = { autocast = "bf16" }
"""


def alone(name: str = "single", *, model: str = "gpt-2-124m") -> Scenario:
    text = ALONE.replace("NAME", name).replace("MODEL", model)
    return parse(text.encode(), where="alone.toml")


@pytest.mark.parametrize(("name", "beside"), [
    ("single", []), ("ddp", ["ddp", "ddp, checkpointing"]),
    ("zero_redundancy", ["zero_redundancy", "zero_redundancy, checkpointing"]),
    ("deepspeed2", None), ("fsdp2", None),
])
def test_on_one_rank_a_plain_module_stands_beside_the_own_strategy_alone(
    name: str, beside: list[str] | None
) -> None:
    """Nothing is sharded there, and the plain module is the fastest."""
    case = alone(name) if name != "deepspeed2" else alone("single").with_(
        strategy={"name": name}, precision={"autocast": "none", "parameters": "bf16"}
    )
    fitted = fit(case)
    ways = [candidate.name for candidate in fitted.candidates]
    assert ways[:2] == ["single", "single, checkpointing"]
    if beside is not None:
        assert ways[2:] == beside
    assert {each.scenario.strategy for each in fitted.candidates} == {"single", name}
    assert str(fitted).startswith("alone: what fits 23.64 GiB\n")
    assert fitted.recommended is not None


def test_what_no_device_holds_is_offloaded_by_the_strategy_that_can() -> None:
    fitted = fit(alone(model="llama-2-7b").with_(
        batch={"micro_batch": 1}, precision={"autocast": "none", "parameters": "bf16"}
    ))
    held = [each.name for each in fitted.candidates if each.memory.verdict == "FITS"]
    assert held
    assert all("strategy fsdp2, offload = true" in name for name in held)
    assert {each.name for each in fitted.candidates} - {*held} == {
        "single", "single, checkpointing"
    }
