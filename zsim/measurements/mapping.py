"""A row's words as those of a scenario file: what all sources share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zsim.measurements.table import RowError

CLUSTERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("h100", "96"), "grand-teton-h100"),
    (("h200",), "dgx-h200"),
    (("h100",), "dgx-h100"),
    (("b200",), "dgx-b200"),
    (("a100", "40"), "dgx-a100-40"),
    (("a100",), "dgx-a100"),
)
"""Words of a GPU's name in lower case, and the preset of eight such in a node; the first that fits. An A100 without a size has 80 GB."""
NOT_SIMULATED = ("pcie", "mi300", "gaudi", "gb200", "gh200", "v100")


def cluster_of(gpu: str) -> str:
    """The cluster preset of the GPU as a source calls it; RowError for one that no preset has."""
    text = gpu.lower()
    known = "" if any(word in text for word in NOT_SIMULATED) else text
    found = next((preset for words, preset in CLUSTERS if all(word in known for word in words)), "")
    if not found:
        raise RowError(f"gpu: expected an A100, H100, H200 or B200 of SXM form, found {gpu[:60]!r}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioText:
    """The tables of a scenario file; those that are empty are left out."""

    description: str
    model: Mapping[str, Any]
    batch: Mapping[str, Any]
    cluster: Mapping[str, Any]
    strategy: Mapping[str, Any]
    precision: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    activation_checkpointing: Mapping[str, Any] = field(default_factory=dict)
    execution: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        tables = (
            ("model", self.model),
            ("batch", self.batch),
            ("cluster", self.cluster),
            ("strategy", self.strategy),
            ("precision", self.precision),
            ("optimizer", self.optimizer),
            ("activation_checkpointing", self.activation_checkpointing),
            ("execution", self.execution),
        )
        lines = [f"{name} = {_toml(table)}" for name, table in tables if table]
        return "\n".join([f"description = {_toml(self.description)}", *lines]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else " " for c in value) + '"'
    return repr(value)
