"""The result of an export: text or bytes of files, and what of the scenario they do not say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zsim.errors import ScenarioError, listed
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

NO_TRAINING = ("description", "expect", "lint", "steps", "seed", "checkpoint")
"""Keys that tell nothing of how a model is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Files by their names, "" for the only one, and what they do not say of the scenario."""

    kind: str
    files: Mapping[str, str | bytes]
    unsaid: tuple[str, ...]
    """Keys of the scenario that the kind has no words for, with a reason where there is one."""

    @property
    def text(self) -> str:
        """The text of the only file; ValueError where there are several."""
        (content,) = self.files.values()
        return content if isinstance(content, str) else content.decode()


@dataclass(slots=True)
class Said:
    """Keys of a scenario that an exporter has said; the others are told."""

    scenario: Scenario
    keys: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)

    def say(self, *keys: str) -> None:
        """Note that the config says these keys."""
        self.keys |= set(keys)

    def but(self, key: str, reason: str) -> None:
        """Note that the config says `key` otherwise, and why."""
        self.reasons[key] = reason

    def say_ends_apart(self, kind: str) -> None:
        """Note that `kind` makes embedding, and last norm with head, units of their own."""
        self.say("wrapping.ends")
        if self.scenario.wrapping.ends == "root" and _can_be_apart(self.scenario):
            self.but("wrapping.ends", f"{kind} makes embedding, and last norm with head, units of "
                                      "their own; ends = \"apart\" is that")

    def unsaid(self) -> tuple[str, ...]:
        """Keys that were written in the scenario and not said."""
        left = [
            key for key in _keys(self.scenario.tables)
            if not any(key == sent or key.startswith(f"{sent}.") for sent in self.keys)
            and not any(key.partition(".")[0] == out for out in NO_TRAINING)
        ]
        lines = [f"{key}: {self.reasons.pop(key)}" if key in self.reasons else key for key in left]
        return (*lines, *(f"{key}: {reason}" for key, reason in self.reasons.items()))


def _can_be_apart(scenario: Scenario) -> bool:
    """False for a model whose head shares the embedding's weight."""
    if scenario.wrapping.every == "all":
        return False
    try:
        scenario.with_(wrapping={"ends": "apart"})
    except ScenarioError:
        return False
    return True


def _keys(tables: Mapping[str, object], prefix: str = "") -> Iterable[str]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and not prefix:
            yield from _keys(value, f"{key}.")
        else:
            yield f"{prefix}{key}"


def require_strategy(scenario: Scenario, config: str, kind: str = "") -> None:
    """ScenarioError where a `config`, as people call its `kind`, has no words for the scenario's
    strategy."""
    if config not in STRATEGIES[scenario.strategy].configs:
        able = sorted(name for name, each in STRATEGIES.items() if config in each.configs)
        raise ScenarioError((
            f"{scenario.name}: strategy.name: expected {listed(able)}, which "
            f"{kind or config} can say, found {scenario.strategy}",
        ))
