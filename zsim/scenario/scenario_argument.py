"""The scenario that a public function is given: refused where it is none, with the way to one."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from zsim.errors import ArgumentError
from zsim.io.arguments import described
from zsim.scenario.scenario import Scenario


def require_scenario(scenario: object) -> None:
    """ArgumentError for anything but a Scenario."""
    if isinstance(scenario, Scenario):
        return
    remedy = (
        "zsim.load reads a scenario's file"
        if isinstance(scenario, str | PathLike)
        else "zsim.Scenario(**tables) makes one"
        if isinstance(scenario, Mapping)
        else "take its `scenario`"
        if isinstance(getattr(scenario, "scenario", None), Scenario)
        else "zsim.load or zsim.Scenario makes one"
    )
    raise ArgumentError(
        where="scenario", expected="a Scenario", found=described(scenario), remedy=remedy
    )
