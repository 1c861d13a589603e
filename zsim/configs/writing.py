"""The table of exporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zsim.configs.exported import Exported
from zsim.configs.exporters import accelerate, chakra, deepspeed, fully_shard, torchtitan
from zsim.errors import ArgumentError
from zsim.scenario.scenario import Scenario

EXPORTERS: Mapping[str, Callable[[Scenario], Exported]] = {
    "accelerate": accelerate.write, "chakra": chakra.write, "deepspeed": deepspeed.write,
    "fully_shard": fully_shard.write, "torchtitan": torchtitan.write,
}
"""Exporters by the names that `zsim export` takes."""


def export_config(scenario: Scenario, kind: str) -> Exported:
    """The scenario as a config of another tool; ScenarioError where that has no words for it."""
    if kind not in EXPORTERS:
        raise ArgumentError(
            where="kind", expected=f"one of {', '.join(EXPORTERS)}", found=str(kind)[:60]
        )
    return EXPORTERS[kind](scenario)
