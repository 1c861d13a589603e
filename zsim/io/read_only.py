"""A read-only mapping, for results that are shared and saved."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", covariant=True)


class ReadOnly(Mapping[Key, Value]):
    """A copy of a mapping without ways to change it; unlike MappingProxyType it is hashed and
    pickled."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[Key, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: Key) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)
