"""The result of an import: the scenario, and what of the config is not in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A scenario from a config of another tool."""

    kind: str
    """The tool, as `zsim import` names it."""
    scenario: Scenario
    ignored: Mapping[str, str]
    """The reason for each key of the config that changes nothing here."""
    assumed: tuple[str, ...]
    """Sentences on what the config leaves open."""

    def to_dict(self) -> dict[str, Any]:
        """Tables, ignored keys and assumptions as plain data."""
        return {
            "kind": self.kind, "scenario": self.scenario.tables, "ignored": dict(self.ignored),
            "assumed": list(self.assumed),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.scenario!r}, from a config of {self.kind}"
        for sentence in self.assumed:
            yield f"assumed: {sentence}"
        by_reason: dict[str, list[str]] = {}
        for key, reason in self.ignored.items():
            by_reason.setdefault(reason, []).append(key)
        for reason, keys in by_reason.items():
            yield f"ignored, {reason}: {', '.join(keys)}"
