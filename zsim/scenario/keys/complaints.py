"""Complaints about tables that are not as the schema has them, by pydantic and in the scenario's
words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError

from zsim.errors import ZsimError
from zsim.io import pydantic_words
from zsim.scenario.keys.did_you_mean import did_you_mean
from zsim.scenario.keys.foreign_keys import FOREIGN_KEYS
from zsim.scenario.keys.models import made, model_of
from zsim.scenario.keys.table import Table, frozen, table_in

EXAMPLES = {
    "model": '{ preset = "llama-3-8b" }', "cluster": '{ preset = "dgx-h100" }',
    "strategy": '{ name = "fsdp2" }', "activation_checkpointing": '{ mode = "full" }',
}
"""A table in place of the text or the flag that people write there first."""


def validated(table: Table, given: object, *, prefix: str, problems: list[str]) -> Any:
    """The `table` that is `given`, or None after adding one line per bad key to `problems`."""
    try:
        return made(table, model_of(table).model_validate(frozen(given)))
    except ValidationError as error:
        complaints: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            path = _path(given, item)
            key = _written([*([prefix] if prefix else []), *path])
            complaint = FOREIGN_KEYS.get(key) or _complaint(table, item, path)
            complaints.setdefault(key, []).append(complaint)
        problems += [
            f"{key}: {_joined(parts)}" for key, parts in complaints.items()
            if not any(other.startswith((f"{key}.", f"{key}[")) for other in complaints)
        ]
    return None


def _joined(complaints: list[str]) -> str:
    """One complaint of the several that a value of no allowed type gives."""
    heads = list(
        dict.fromkeys(
            complaint.split(", found ")[0].removeprefix("expected ") for complaint in complaints
        )
    )
    if len(heads) == 1:
        return complaints[0]
    return f"expected {' or '.join(heads)}, found {complaints[0].partition(', found ')[2]}"


def _complaint(table: Table, item: Any, path: Sequence[str | int]) -> str:
    """The complaint about the value at `path`."""
    if item["type"] == "extra_forbidden":
        return f"unknown key{did_you_mean(str(path[-1]), _names_at(table, path[:-1]))}"
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, ZsimError):
        return cause.complaint
    expected = pydantic_words.expected_text(item, table="a table, { key = value }")
    remedy = pydantic_words.remedy_text(item)
    if item["type"] in ("model_type", "dict_type") and path and path[-1] in EXAMPLES:
        remedy = f"write {path[-1]} = {EXAMPLES[str(path[-1])]}"
    complaint = f"expected {expected}, found {pydantic_words.found_text(item)}"
    return f"{complaint}; {remedy}" if remedy else complaint


def _path(table: object, item: Any) -> list[str | int]:
    """The keys and indices that lead to the value. Parts of the location that name the variant of
    a union are in no table, and left out."""
    path: list[str | int] = []
    value, missing = table, item["type"] == "missing"
    for at, part in enumerate(item["loc"], start=1):
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list | tuple) and isinstance(part, int)):
            value = value[part]  # type: ignore[index]
            path.append(part)
        elif missing and at == len(item["loc"]):
            path.append(part)
    return path


def _written(path: Sequence[str | int]) -> str:
    """A path as people write it: faults[0].node."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in path)
    return text.removeprefix(".")


def _names_at(table: Table, path: Sequence[str | int]) -> list[str]:
    """The keys that the table at `path` may have."""
    for name in (part for part in path if isinstance(part, str)):
        inner = _inside(table.keys[name].kind) if name in table.keys else None
        if inner is None:
            return []
        table = inner
    return list(table.keys)


def _inside(kind: Any) -> Table | None:
    """The table that a key may be, or each entry of its list."""
    tables = (table_in(kind), *map(_inside, get_args(kind)))
    return next((table for table in tables if table is not None), None)
