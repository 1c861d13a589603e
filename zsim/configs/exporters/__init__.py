"""The exporters: each writes the config of one tool from a scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from zsim.loaded import Loaded

if TYPE_CHECKING:
    from zsim.configs.exported import Exported
    from zsim.scenario.scenario import Scenario

EXPORTERS: Mapping[str, Callable[[Scenario], Exported]] = Loaded({
    name: f"{__name__}.{name}:write" for name in (
        "accelerate", "chakra", "deepspeed", "fully_shard", "torchtitan"
    )
})
"""Exporters by the names that `zsim export` takes."""
