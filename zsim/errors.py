"""Errors with the four things that their reader needs: where, expected, found, remedy.

This module knows nothing else of the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

MOST_SHOWN = 60
"""Longest excerpt of a value in an error message, in characters."""
MOST_ITEMS = 8
"""Longest excerpt of a list or a table, in items."""
MOST_INT = 10**MOST_SHOWN
"""Largest integer that an error message shows."""

_PARTS = re.compile(
    r"(?P<where>.*?): expected (?P<expected>.*?), found (?P<found>.*?)(?:; (?P<remedy>.*))?",
    re.DOTALL,
)
"""Regular expression of a problem's parts: where, expected, found, remedy."""
_STATED = re.compile(
    r"(?P<where>.*?(?:: [\w.\[\]-]+)*): (?P<found>.*?)"
    r"(?:(?:; |, (?=did you mean ))(?P<remedy>.*))?",
    re.DOTALL,
)
"""Regular expression of a problem that states what is wrong: where, what, remedy."""


def visible(text: str) -> str:
    """`text` with a ? for each character that a terminal would not show but obey; lines and tabs
    stay."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
    )


def shown(value: object) -> str:
    """A value of a file as TOML writes it: true, 1.5, "text", ["a", "b"], { a = 1 }; null is
    JSON's. What is long or deep is cut."""
    if isinstance(value, str):
        return json.dumps(_cut(value), ensure_ascii=False)
    if isinstance(value, dict):
        pairs = [
            f"{str(key)[:MOST_SHOWN]} = {_inner(item)}"
            for key, item in islice(value.items(), MOST_ITEMS)
        ]
        return f"{{ {_cut(', '.join(pairs))} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        items = [*map(_inner, value[:MOST_ITEMS]), *(["…"] if len(value) > MOST_ITEMS else [])]
        return f"[{_cut(', '.join(items))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int) and abs(value) > MOST_INT:  # Python refuses to print it
        return f"an integer of {value.bit_length():,} bits"
    return _cut(str(value))


def listed(values: Iterable[object], last: str = "or") -> str:
    """Values as every message lists them, "none" for none. Words are bare, unless values of other
    kinds are among them: then each is as TOML writes it.

    >>> listed(["ddp", "fsdp2", "hsdp"]), listed([True, False, "auto"]), listed([1, 2], "and")
    ('ddp, fsdp2 or hsdp', 'true, false or "auto"', '1 and 2')
    """
    several = tuple(values)
    bare = all(isinstance(value, str) for value in several)
    *most, end = [str(value) if bare else shown(value) for value in several] or ["none"]
    return f"{', '.join(most)} {last} {end}" if most else end


def _inner(value: object) -> str:
    return "…" if isinstance(value, list | tuple | dict) else shown(value)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


@dataclass(frozen=True, slots=True)
class Caveat:
    """A warning: its text, and by how much it widens the band of a step's time.

    `widens` is the share on both sides.
    """

    text: str
    widens: float = 0.0


def key_of(problem: str) -> str:
    """The key, or the place, that a problem begins with.

    >>> key_of("batch.micro_batch: expected a whole number, found 1.5")
    'batch.micro_batch'
    """
    return problem.partition(": ")[0]


def complaint_of(problem: str) -> str:
    """A problem without its key."""
    return problem.partition(": ")[2]


class ZsimError(Exception):
    """An error with the four things its reader needs; `exit_code` is what the command line returns
    for it."""

    exit_code = 2
    details = ""
    """Lines that a reader may want besides, such as the traceback of a user's own code."""

    def __init__(self, *, where: str, expected: str, found: str, remedy: str = "") -> None:
        self.where, self.expected, self.found, self.remedy = where, expected, found, remedy
        super().__init__(self.__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled attribute by attribute, for pools of processes: an exception's own
        way would call __init__ with its text."""
        return _remade, (type(self), *self.args), vars(self)

    def __str__(self) -> str:
        return visible(f"{self.where}: {self.complaint}")

    @property
    def complaint(self) -> str:
        """The error without its place, for callers with a nearer one: a file's key, a column."""
        text = f"expected {self.expected}, found {self.found}"
        return f"{text}; {self.remedy}" if self.remedy else text

    @property
    def lines(self) -> tuple[str, ...]:
        """The error's lines."""
        return tuple(str(self).splitlines())

    def under(self, title: str) -> tuple[str, ...]:
        """The lines without the `title` in front, for callers that say it themselves."""
        return tuple(line.removeprefix(f"{title}: ") for line in self.lines)


def _remade(kind: type[ZsimError], *arguments: object) -> ZsimError:
    return kind.__new__(kind, *arguments)


class ScenarioError(ZsimError):
    """A scenario file that cannot be used. `problems` lists every complaint, one `file: key: …`
    line each; `where`, `expected`, `found` and `remedy` are those of the first."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = tuple(map(visible, problems))
        first = self.problems[0] if problems else "scenario"
        parts = _PARTS.fullmatch(first) or _STATED.fullmatch(first)
        named = parts.groupdict("") if parts else {"where": "scenario", "found": first}
        super().__init__(**{"expected": "a scenario without mistakes", **named})

    def __str__(self) -> str:
        return "\n".join(self.problems)

    @property
    def lines(self) -> tuple[str, ...]:
        """The problems, one a line."""
        return self.problems


class ArgumentError(ZsimError):
    """An argument of another type or value than its function takes, or two that contradict each
    other."""


class ProgramError(ZsimError):
    """A Program that breaks a rule of the IR: an unknown wait, a buffer freed twice, a text line
    that does not parse."""


class DeadlockError(ZsimError):
    """Ranks that wait for one another forever; the message names each waiting rank and the op it
    waits at."""

    exit_code = 1


class RankError(ZsimError):
    """A rank that died, hung, raised or ran out of memory in a real run."""

    exit_code = 1


class BackendUnavailableError(ZsimError):
    """A backend that is not installed, or whose devices are not there."""

    exit_code = 3
