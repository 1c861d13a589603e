"""`zsim fit` over scenarios of every strategy: it answers, and what it moves to another strategy
means the same there."""

from __future__ import annotations

import json

import pytest

from tests.support.folders import PARITY
from tests.support.sampling import one_in
from zsim.analysis.alternatives import moved
from zsim.cli import main
from zsim.scenario.scenario import load
from zsim.strategies import STRATEGIES

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
