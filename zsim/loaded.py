"""Tables of values by name, each imported when it is first looked up.

A command that needs one strategy, library or family waits for no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


class Loaded(Mapping[str, T]):
    """Values by name, from the place of each, as "package.module:NAME".

    >>> Loaded[float]({"pi": "math:pi"})["pi"]
    3.141592653589793
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            module, _, attribute = self._places[name].partition(":")
            self._values[name] = getattr(import_module(module), attribute)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
