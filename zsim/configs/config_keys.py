"""Keys of a config, taken one by one with the kind that is expected.

What nobody takes and nobody ignores is unknown, and told with the nearest known key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from zsim.configs.notes import Notes
from zsim.errors import listed, shown

AUTO = "auto"
"""Value that the tool's trainer fills in from its own arguments."""
TRUE, FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
MISSING = object()
ALIKE = 0.8
"""Likeness by difflib of an unknown key to a known one that it is a slip of."""
MODEL_PARALLEL = ("tensor and pipeline parallelism are not modelled; --drop leaves it out: each "
                  "rank then has the whole model")
"""End of the refusal of ranks that share a model."""
VARIABLE = re.compile(r"\b[A-Z_][A-Z0-9_]{0,80}\b")
"""A variable in a value of a shell script, which has a $ in it."""
CALLED, ARGUMENTS = "called", "arguments"
"""Keys of a call in a Python config: the function's name, and its positional arguments."""


class ConfigKeys:
    """One table of a config. `prefix` is the way to it, as messages say it."""

    def __init__(self, table: Mapping[str, Any], notes: Notes, prefix: str = "") -> None:
        self.notes, self.prefix = notes, prefix
        self._rest = dict(table)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._rest

    @property
    def left(self) -> tuple[str, ...]:
        """The keys that nobody has taken yet."""
        return tuple(self._rest)

    def any(self, key: str, default: Any = None) -> Any:
        """The value of `key` as it is, and of no use to anybody else."""
        self._known.append(key)
        return self._rest.pop(key, default)

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number, also as JSON's 5e8; `default` where it is missing, null or "auto"."""
        value: Any = self.any(key)
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value.strip()[:18])
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value in (None, AUTO):
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "a whole number", value)
            return default
        return value

    def whole_or_open(self, key: str) -> int | None:
        """A whole number; None where it is missing, or a variable of a script, which is asked
        otherwise."""
        if str(self._rest.get(key)).startswith("$"):
            self.any(key)
        return self.whole(key)

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number, also as text, for YAML reads 1e-5 as text."""
        value = self.any(key)
        if value in (None, AUTO):
            return default
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            self._wrong(key, "a number", value)
            return default

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """True or false, also as the words of accelerate's configs."""
        value = self.any(key)
        if value is None or value == AUTO:
            return default
        word = str(value).lower()
        if word not in TRUE + FALSE:
            self._wrong(key, "true or false", value)
            return default
        return word in TRUE

    def text(self, key: str, default: str | None = None) -> str | None:
        """A text; `default` where it is missing or null."""
        value = self.any(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self._wrong(key, "text", value)
            return default
        return value

    def word(self, key: str, choices: Iterable[str], default: str | None = None) -> str | None:
        """One of `choices`, in any case of letters; `default` where it is missing or null. YAML
        reads a bare no as false."""
        value = self.any(key)
        value = "no" if value is False else value
        if value is None:
            return default
        chosen = {choice.lower(): choice for choice in choices}
        if str(value).lower() not in chosen:
            self._wrong(key, listed(chosen.values()), value)
            return default
        return chosen[str(value).lower()]

    def table(self, key: str) -> ConfigKeys:
        """The table under `key`; an empty one where it is missing or null."""
        value = self.any(key)
        if not isinstance(value, dict | None):
            self._wrong(key, "a table", value)
            value = None
        return ConfigKeys(value or {}, self.notes, f"{self.prefix}{key}.")

    def is_auto(self, key: str) -> bool:
        """True where the trainer fills in the value."""
        return bool(self._rest.get(key, MISSING) == AUTO)

    def ignore(self, reason: str, *keys: str) -> None:
        """Tell that these keys are left out, where they are there; each a name, or a shell-style
        pattern of names."""
        for key in keys:
            if "*" in key:
                self.ignore(reason, *(name for name in self.left if fnmatchcase(name, key)))
                continue
            if key in self._rest:
                self.notes.ignored[f"{self.prefix}{key}"] = reason
            self.any(key)

    def only(self, key: str, default: Any, *, unmodelled: str) -> None:
        """Leave out `key` where it has its `default`, and refuse it otherwise: `unmodelled`, whose
        --drop gets the key's name."""
        value = self.any(key, default)
        if value in (None, "", [], {}) or str(value).lower() == str(default).lower():
            return
        name = f"{self.prefix}{key}"
        self.notes.problem(
            name, f"expected {shown(default)}, found {shown(value)}; "
                  f"{unmodelled.replace('--drop', f'--drop {name}', 1)}"
        )

    def close(self) -> None:
        """Tell the unknown keys: slips with the known key, the others with the option that leaves
        them out."""
        others: list[str] = []
        for key, value in self._rest.items():
            name = f"{self.prefix}{key}"[:100]
            if key in (CALLED, ARGUMENTS):
                continue
            if str(key).startswith("_"):
                self.notes.ignored[name] = "a comment"
            elif near := difflib.get_close_matches(str(key), self._known, n=1, cutoff=ALIKE):
                self.notes.problem(name, f"unknown key, did you mean {near[0]}?")
            elif value is None:
                self.notes.ignored[name] = "null says nothing"
            else:
                others.append(name)
        if others:
            first, *more = others
            beside = f", and so {'are' if more[1:] else 'is'} {', '.join(more)}" if more else ""
            self.notes.problem(first, f"unknown key{beside}; --drop {','.join(others)} leaves "
                                      f"{'them' if more else 'it'} out")

    def _wrong(self, key: str, expected: str, value: Any) -> None:
        """Note a value of another kind, or the variable of a script that has no one value."""
        if "$" in str(value) and (variables := VARIABLE.findall(str(value))):
            self.notes.variables += variables
            return
        self.notes.problem(f"{self.prefix}{key}", f"expected {expected}, found {shown(value)}")
