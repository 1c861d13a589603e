"""Notes of an import: problems, keys that were ignored, and what was assumed."""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.errors import ScenarioError


@dataclass(slots=True)
class Notes:
    """Notes that importers take while they read a config."""

    where: str
    """The file, as messages name it."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Keys, and what is wrong with each."""
    ignored: dict[str, str] = field(default_factory=dict)
    """The reason for each key of the config that no scenario has."""
    assumed: list[str] = field(default_factory=list)
    """Sentences on what the config leaves open and the scenario says."""
    variables: list[str] = field(default_factory=list)
    """Variables of a script that arguments need, and that have no one value in it."""

    def problem(self, key: str, text: str) -> None:
        """Note that `key` is wrong, contradictory or missing."""
        self.problems.append((key, text))

    def refused(self, key: str) -> bool:
        """True where a problem of `key`, or of a key in it, is noted."""
        return any(f"{problem}.".startswith(f"{key}.") for problem, _ in self.problems)

    def assume(self, text: str) -> None:
        """Note a choice that the config does not make."""
        if text not in self.assumed:
            self.assumed.append(text)

    def require_none(self) -> None:
        """ScenarioError with every problem, if there is any."""
        if names := list(dict.fromkeys(self.variables)):
            self.problem("variables", f"the script gives no value, or several, to "
                                      f"{', '.join(names)}; give --set {names[0]}=…"
                                      f"{', and so on' if names[1:] else ''}")
            self.variables.clear()
        if self.problems:
            problems = [f"{self.where}: {key[:120]}: {text}" for key, text in self.problems]
            raise ScenarioError(tuple(dict.fromkeys(problems)))
