"""Versions of torch: the table of differences, and what each does to a Program."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.ir.ops import COLLECTIVES, Free
from zsim.ir.program import PHASES, RankProgram
from zsim.models import torch_versions
from zsim.models.torch_versions import (
    DIFFERENCES,
    NEWEST,
    SUPPORTED,
    TorchVersion,
    apart,
    version_of,
)
from zsim.runs.backend import RunOptions
from zsim.runs.compare.compare import compare
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

OLDER = SUPPORTED[:-1]


def scenario(**more: object) -> Scenario:
    return zsim.Scenario(**{
        "model": {"preset": "gpt-tiny"}, "cluster": {"preset": "cpu-gloo", "ranks": 4},
        "batch": {"micro_batch": 1, "sequence_length": 8}, "strategy": {"name": "fsdp2"}, **more,
    })


HSDP = {"name": "hsdp", "dp_replicate": 2, "dp_shard": 2}
AFFECTED = {
    torch_versions.INPUT_BESIDE_THE_NEXT: scenario(),
    torch_versions.INPUT_PAST_IDLE_UNITS: scenario(frozen=["blocks.0.*"]),
    torch_versions.RESHARD_ALONE: scenario(strategy=HSDP),
    torch_versions.BARRIER_STAYS: scenario(strategy={"name": "deepspeed3"}),
}
"""A scenario for each difference that a Program follows."""


def program(case: Scenario, torch: TorchVersion) -> RankProgram:
    return plan(case, device="cpu", torch=torch).of_rank(0)


def most_inputs(of: RankProgram) -> int:
    """The largest number of reduce-scatters' inputs that live at once in a step."""
    live = most = 0
    for event in (event for op in of.steady for event in op.memory):
        if ".reduce_input" in event.buffer:
            live += -1 if isinstance(event, Free) else 1
            most = max(most, live)
    return most


def test_the_supported_versions_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = [
        each for each in project["optional-dependencies"]["real"] if each.startswith("torch")
    ]
    above = f"2.{int(NEWEST.partition('.')[2]) + 1}"
    assert asked == f"torch>={SUPPORTED[0]},<{above}"


@pytest.mark.parametrize(
    "difference", [*DIFFERENCES, torch_versions.IDLE_UNTIL_ALL_RAN], ids=lambda each: each.meaning
)
def test_a_difference_is_one_of_older_supported_versions_in_strategies_that_exist(
    difference: torch_versions.Difference,
) -> None:
    assert difference.versions
    assert set(difference.versions) <= set(OLDER)
    assert difference.library in {strategy.library for strategy in STRATEGIES.values()}


def test_the_page_of_real_runs_names_each_difference_with_its_versions() -> None:
    page = (ROOT / "zreal/README.md").read_text(encoding="utf-8")
    table = [
        f"| {', '.join(each.versions)} | {each.meaning}"
        for each in (*DIFFERENCES, torch_versions.IDLE_UNTIL_ALL_RAN)
    ]
    assert [row for row in table if row not in page] == []


@pytest.mark.parametrize(("text", "version"), [
    ("2.11.0+cu130", "2.11"), ("2.12.1", "2.12"), ("2.12", "2.12"), ("2.13.0+cpu", "2.13"),
    ("2.1.0", NEWEST), ("2.14.0", NEWEST), ("", NEWEST),
])
def test_a_version_is_read_from_torchs_own_text(text: str, version: str) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.meaning)
def test_memory_follows_a_difference_and_collectives_do_not(
    difference: torch_versions.Difference,
) -> None:
    case = AFFECTED[difference]
    newest = program(case, NEWEST)
    for torch in OLDER:
        older = program(case, torch)
        events = [[op.memory for op in of.construction + of.steady] for of in (newest, older)]
        assert (events[0] != events[1]) >= (torch in difference.versions)
        for phase in PHASES:
            sent = [
                [(op.kind, op.unit, op.nbytes) for op in of.phase(phase) if op.kind in COLLECTIVES]
                for of in (newest, older)
            ]
            assert sent[0] == sent[1]


def test_torch_2_12_holds_two_inputs_of_reduce_scatters_at_once() -> None:
    most = {torch: most_inputs(program(scenario(), torch)) for torch in SUPPORTED}
    assert most == {"2.11": 1, "2.12": 2, "2.13": 1}


def test_a_unit_without_gradients_frees_the_last_input_from_torch_2_12_on() -> None:
    case = scenario(frozen=["blocks.0.*"])
    freed = {
        torch: [
            op.unit for op in program(case, torch).steady
            for event in op.memory
            if isinstance(event, Free) and event.buffer == "blocks.1.reduce_input"
        ]
        for torch in SUPPORTED
    }
    assert freed["2.11"] != freed["2.12"] == freed["2.13"]


def test_memory_measured_with_a_torch_that_differs_is_not_compared_and_the_verdict_says_why() -> (
    None
):
    case = scenario()
    predicted = SimBackend("cpu").run(case, options=RunOptions())
    measured = replace(
        SimBackend("cpu", torch="2.12").run(case, options=RunOptions()), interpreter="observer",
        backend="fake",
    )
    checks = {check.name: check for check in compare(predicted, measured)}
    meaning = torch_versions.INPUT_BESIDE_THE_NEXT.meaning
    told = (
        "unsupported: predicted for torch 2.13, measured with torch 2.12, which differ: " + meaning
    )
    assert checks["peak memory, steady"].detail == told
    assert checks["collective order"].status == "ok"
    assert apart("2.12", "2.12", library="fully_shard") == ()
    assert apart("2.11", "2.13", library="ddp") == ()
