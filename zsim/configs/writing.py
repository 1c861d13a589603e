"""The table of exporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zsim.configs.exported import Exported
from zsim.configs.exporters import accelerate, chakra, deepspeed, fully_shard, torchtitan
from zsim.scenario.scenario import Scenario

EXPORTERS: Mapping[str, Callable[[Scenario], Exported]] = {
    "accelerate": accelerate.write, "chakra": chakra.write, "deepspeed": deepspeed.write,
    "fully_shard": fully_shard.write, "torchtitan": torchtitan.write,
}
"""Exporters by the names that `zsim export` takes."""

