"""Values of JSON that anybody may have written, read one by one: each is what was expected, or
refused with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zsim.errors import ZsimError
from zsim.io.limits import MAX_INT

MAX_NAME = 400
MAX_SENTENCE = 400
MAX_ITEMS = 10_000_000


class TwiceError(ValueError):
    """A table in JSON has a key twice, of which a reader that says nothing would take the last."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:60]!r} twice in a table")


def loads(text: str | bytes) -> Any:
    """What JSON text says; ValueError where it is none, TwiceError of a key that is given twice,
    RecursionError where it is too deep."""
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise TwiceError(
            next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
        )
    return table


class UnreadableError(ZsimError):
    """JSON that does not say what was expected at some place of it."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A value of untrusted JSON and the place where it stands; each method returns it checked, or
    refuses it."""

    value: Any
    where: str

    def refuse(self, expected: str) -> UnreadableError:
        """The error to raise when the value is not `expected`."""
        found = f"{type(self.value).__name__} {str(self.value)[:60]!r}"
        return UnreadableError(where=self.where, expected=expected, found=found)

    def table(self, *keys: str, lists: tuple[str, ...] = ()) -> dict[str, Reader]:
        """A table with just these keys, and perhaps some of `lists`, which are empty where they are
        missing."""
        if not isinstance(self.value, dict) or set(self.value).difference(lists) != set(keys):
            raise self.refuse(f"a table of {', '.join(keys)}")
        return {
            key: Reader(self.value.get(key, []), f"{self.where}: {key}") for key in (*keys, *lists)
        }

    def items(self, *, at_most: int = MAX_ITEMS) -> Iterator[Reader]:
        """The items of a list."""
        if not isinstance(self.value, list) or len(self.value) > at_most:
            raise self.refuse(f"a list of at most {at_most:,}")
        return (Reader(item, f"{self.where}[{place}]") for place, item in enumerate(self.value))

    def row(self, length: int) -> list[Reader]:
        """A list of exactly `length` items."""
        if not isinstance(self.value, list) or len(self.value) != length:
            raise self.refuse(f"a list of {length}")
        return list(self.items())

    def size(self) -> int:
        """A whole number that fits 63 bits and is not negative."""
        if (
            not isinstance(self.value, int)
            or isinstance(self.value, bool)
            or not 0 <= self.value <= MAX_INT
        ):
            raise self.refuse("a whole number from 0 to 2^63 - 1")
        return self.value

    def truth(self) -> bool:
        """true or false."""
        if not isinstance(self.value, bool):
            raise self.refuse("true or false")
        return self.value

    def name(self, *, empty: bool = False) -> str:
        """A name without blanks."""
        text = self.value
        if (
            not isinstance(text, str)
            or len(text) > MAX_NAME
            or (not is_name(text) and (text or not empty))
        ):
            raise self.refuse(f"a name of 1 to {MAX_NAME} characters without blanks")
        return text

    def sentence(self) -> str:
        """Some printable words."""
        if (
            not isinstance(self.value, str)
            or len(self.value) > MAX_SENTENCE
            or not self.value.isprintable()
        ):
            raise self.refuse(f"a sentence of at most {MAX_SENTENCE} characters")
        return self.value

    def one_of(self, words: tuple[str, ...]) -> Any:
        """One of a closed list."""
        if not isinstance(self.value, str) or self.value not in words:
            raise self.refuse(f"one of {', '.join(words)}")
        return self.value


def is_name(text: str) -> bool:
    """Whether `text` can name a module, a parameter or a buffer in the text form of Programs:
    visible, without blanks."""
    return (
        0 < len(text) <= MAX_NAME
        and text.isprintable()
        and not any(c.isspace() or c in ",|" for c in text)
    )
