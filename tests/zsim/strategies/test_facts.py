"""Facts of strategies are asked of their entries, not of their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.folders import ROOT
from zsim.strategies import ALONE, LADDER, STAGES, STRATEGIES

CONFIGS = {
    "accelerate": {"single", "ddp", "fsdp1", "fsdp2", "hsdp"}, "fully_shard": {"fsdp2", "hsdp"},
    "torchtitan": {"single", "ddp", "fsdp2", "hsdp"},
    "deepspeed": {
        "ddp", "zero1", "zero2", "zero3", "deepspeed1", "deepspeed2", "deepspeed3",
    },
}


def asks_by_name(source: str) -> Iterator[int]:
    """The lines that compare a strategy with a name, or ask options for what not all have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {
                part.value for side in sides for part in ast.walk(side)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
            asked = [side.attr for side in sides if isinstance(side, ast.Attribute)]
            if "strategy" in asked and names & STRATEGIES.keys():
                yield node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            of, *_ = node.args
            if isinstance(of, ast.Attribute) and of.attr == "options" and len(node.args) == 3:
                yield node.lineno


@pytest.mark.parametrize("package", ["zsim", "zreal"])
def test_nobody_asks_for_a_strategy_by_name(package: str) -> None:
    files = [
        file for file in (ROOT / package).rglob("*.py")
        if not file.is_relative_to(ROOT / "zsim" / "strategies")
    ]
    asking = {
        str(file.relative_to(ROOT)): lines for file in files
        if (lines := list(asks_by_name(file.read_text(encoding="utf-8"))))
    }
    assert len(files) > 50
    assert asking == {}


@pytest.mark.parametrize("line", [
    'x = scenario.strategy == "hsdp"', 'x = scenario.strategy in ("fsdp2", "hsdp")',
    'getattr(scenario.options, "offload", False)',
])
def test_a_question_by_name_is_seen(line: str) -> None:
    assert list(asks_by_name(line)) == [1]


@pytest.mark.parametrize("config", CONFIGS)
def test_configs_are_written_of_the_strategies_that_they_can_say(config: str) -> None:
    able = {name for name, strategy in STRATEGIES.items() if config in strategy.configs}
    assert able == CONFIGS[config]


def test_an_option_that_offloads_is_one_of_the_strategys() -> None:
    for strategy in STRATEGIES.values():
        if strategy.offload_option:
            offloaded = strategy.options(**{strategy.offload_option: True})
            assert strategy.offloads(offloaded)
            assert not strategy.offloads(strategy.options())


def test_lists_of_strategies_have_names_that_exist() -> None:
    assert {ALONE, *LADDER, *STAGES} <= STRATEGIES.keys()


def test_a_strategy_whose_own_option_offloads_stands_for_one_that_cannot() -> None:
    for strategy in STRATEGIES.values():
        if strategy.offloaded_by:
            assert not strategy.offload_option
            assert STRATEGIES[strategy.offloaded_by].offload_option
        if strategy.on_several_ranks:
            assert not STRATEGIES[strategy.on_several_ranks].on_several_ranks
