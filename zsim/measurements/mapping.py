"""A row's words as those of a scenario file: what all sources share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLUSTERS: Mapping[str, str] = {
    "a100_40gb": "dgx-a100-40",
    "a100-40gb": "dgx-a100-40",
    "a100_80gb": "dgx-a100",
    "a100-80gb": "dgx-a100",
    "a100": "dgx-a100",
    "h100_80gb": "dgx-h100",
    "h100-80gb": "dgx-h100",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
}
"""The cluster preset of eight such GPUs in a node, by the source's word for the GPU in lower case."""


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
