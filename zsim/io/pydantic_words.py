"""The complaints of pydantic in our words, for scenario files, saved Runs and traced models."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping
from difflib import get_close_matches
from math import ceil, floor, isfinite
from typing import Any

from zsim.errors import MOST_INT, listed, shown

EXPECTED: Mapping[str, str] = {
    "missing": "a value",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "{table}",
    "model_type": "{table}",
    "greater_than_equal": "at least {ge:,}",
    "greater_than": "more than {gt:,}",
    "less_than_equal": "at most {le:,}",
    "less_than": "less than {lt:,}",
    "too_long": "at most {max_length:,} entries",
    "string_too_long": "at most {max_length:,} characters",
}
"""The words for each kind of error; in braces its bounds."""
_LITERAL = re.compile(r"'[^']*'|[^\s,']+(?=,| or |$)")
"""A value of pydantic's list of literals, as Python writes it."""


def expected_text(
    error: Mapping[str, Any], *, table: str = "a table", alone: bool = True
) -> str:
    """The value that one of a ValidationError's `errors()` expected; a `table` is called so, and
    words have quotes unless they stand `alone`."""
    kind = error["type"]
    bounds = {name: _whole(bound) for name, bound in error.get("ctx", {}).items()}
    if kind == "literal_error":
        values = [literal_eval(text) for text in _LITERAL.findall(error["ctx"]["expected"])]
        return listed(values if alone else map(shown, values))
    if kind not in EXPECTED:
        return str(error["msg"][:200].removeprefix("Value error, ").removeprefix("expected "))
    return EXPECTED[kind].format(**bounds, table=table)


def found_text(error: Mapping[str, Any]) -> str:
    """The value in place of that, or the length of one that is too long."""
    if error["type"] == "missing":
        return "nothing"
    value = error["input"]
    return f"{len(value):,}" if "too_long" in error["type"] else shown(value)


def remedy_text(error: Mapping[str, Any]) -> str:
    """Whole numbers around a fraction, or the choice nearest to a word; "" for other mistakes."""
    value = error["input"]
    if error["type"] == "literal_error" and isinstance(value, str):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        near = get_close_matches(value.lower(), choices, n=1)
        return f"did you mean {near[0]}?" if near else ""
    if error["type"] not in ("int_type", "int_from_float") or not isinstance(value, float):
        return ""
    if not isfinite(value) or abs(value) > MOST_INT:
        return ""
    return f"write {listed(dict.fromkeys([floor(value), ceil(value)]))}"


def _whole(bound: Any) -> Any:
    """0 for 0.0: the schema's own spelling is no matter of the user's."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound
