"""JSON from untrusted text, with each key of a table once, and the names that it may give."""

from __future__ import annotations

import json
from typing import Any

MAX_NAME = 400
MAX_SENTENCE = 400


class TwiceError(ValueError):
    """A table in JSON has a key twice, of which Python's own reader would take the last."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:60]!r} twice in a table")


def loads(text: str | bytes) -> Any:
    """The value of JSON text; ValueError for other text, TwiceError for a repeated key,
    RecursionError for too deep nesting."""
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise TwiceError(
            next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        )
    return table


def is_name(text: str) -> bool:
    """True if `text` can name a module, parameter or buffer in the text form of Programs: visible,
    without blanks."""
    return (
        0 < len(text) <= MAX_NAME
        and text.isprintable()
        and not any(c.isspace() or c in ",|" for c in text)
    )
