"""A scenario's tables: plain data as TOML has it, from a file or from Python; merged, and as TOML.

It knows which keys exclude one another, and that a quantity of Python in `expect` is an equality.
It knows no other key's meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Integral
from os import PathLike, fsdecode
from typing import Any

from zsim.io import limits
from zsim.io.quantities import Bytes, Duration

Table = Mapping[str, Any]
NAMED_BY: Mapping[str, tuple[frozenset[str], ...]] = {
    "model": (
        frozenset({"preset", "num_layers", "attention"}),
        frozenset({"family", "sizes"}),
        frozenset({"huggingface"}),
        frozenset({"traced"}),
    ),
    "cluster": (frozenset({"preset"}), frozenset({"file"})),
}
"""The alternative ways to name a model or a cluster, each by the keys that go with it alone."""


def plain(value: Any, problems: list[str]) -> Any:
    """`value` of Python as TOML would have it: tuples as lists, paths and quantities as text,
    without None.

    `problems` gets a line for each value that no TOML text can hold, and one for more than a file
    can.
    """
    walk = _Walk(problems)
    made = walk.plain(value, "", 0)
    if walk.room < 0:
        problems.append(f"expected at most {limits.MAX_BYTES:,} bytes of TOML, as in a file, found "
                        f"more")
    return made


class _Walk:
    """A walk through values of Python, as long as what it makes has room in a file."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.room = limits.MAX_BYTES
        """Bytes that are left of a file."""

    def plain(self, value: Any, key: str, depth: int) -> Any:
        """`value`, which is at `key`, as TOML would have it."""
        if depth > limits.MAX_NESTING:
            self._refuse(key, f"at most {limits.MAX_NESTING} nested tables and lists", "more")
            return None
        if isinstance(value, Mapping):
            return self._table(value, key, depth)
        if isinstance(value, list | tuple):
            made: list[Any] = []
            for index, inner in enumerate(value):
                self.room -= len(", ")
                if self.room < 0:
                    break
                made.append(self.plain(inner, f"{key}[{index}]", depth + 1))
            return made
        return self._single(value, key)

    def _table(self, table: Mapping[Any, Any], key: str, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, inner in table.items():
            if inner is None:
                continue
            if not isinstance(name, str) or not _is_encodable(name):
                actual = "a lone surrogate" if isinstance(name, str) else _type(name)
                self._refuse(key, "keys of text that UTF-8 can hold", actual)
                continue
            own = str.__str__(name)
            self.room -= len(" = , ") + len(_key(own).encode())
            if self.room < 0:
                break
            made[own] = self.plain(inner, f"{key}.{own}" if key else own, depth + 1)
        return made

    def _single(self, value: Any, key: str) -> Any:
        """A value that has no others in it, as the type of Python's own that TOML knows."""
        match value:
            case bool():
                made: Any = value
            case Bytes() | Duration():
                exact = f"{int(value)} {'B' if isinstance(value, Bytes) else 'ns'}"
                made = f"== {exact}" if key.startswith("expect.") else exact
            case Integral():  # an int, an IntEnum, an int of numpy
                made = int(value)
            case float():
                made = float.__float__(value)
            case str() | PathLike():
                made = str.__str__(value if isinstance(value, str) else fsdecode(value))
            case _:
                self._refuse(key, "text, a number, true or false, a list or a table", _type(value))
                return None
        if isinstance(made, str) and not _is_encodable(made):
            self._refuse(key, "text that UTF-8 can hold", "a lone surrogate")
        elif isinstance(made, str) or -limits.MAX_INT <= made <= limits.MAX_INT:
            self.room -= len(in_line(made).encode())
        return made

    def _refuse(self, key: str, expected: str, found: str) -> None:
        self.problems.append(f"{key[:100] or 'tables'}: expected {expected}, found {found}")


def _type(value: object) -> str:
    """The type of a value, which may say anything of itself."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a value of type {module}{kind.__name__}"


def _is_encodable(text: str) -> bool:
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return False
    return True


def merged(tables: Table, changes: Table) -> dict[str, Any]:
    """`tables` with `changes`, tables key by key and anything else replaced; None removes a key.

    Another strategy's table replaces the whole one. Another way to name the model or the cluster
    drops the keys of the ways before it.
    """
    result = dict(tables)
    for key, change in changes.items():
        before = tables.get(key)
        if isinstance(change, Mapping) and isinstance(before, Mapping):
            result[key] = merged(_kept(key, before, change), change)
        else:
            result[key] = change
    return {key: value for key, value in result.items() if value is not None}


def _kept(key: str, before: Table, change: Table) -> Table:
    """The keys of the table `before` that go together with `change`."""
    if key == "strategy" and change.get("name", before.get("name")) != before.get("name"):
        return {}
    ways = NAMED_BY.get(key, ())
    chosen = [way for way in ways if any(change.get(name) is not None for name in way)]
    dropped = frozenset().union(*(way for way in ways if chosen and way not in chosen))
    return {name: value for name, value in before.items() if name not in dropped}


def to_toml(tables: Table) -> str:
    """TOML text of `tables`, one line a key; `expect` comes last, one line an entry."""
    lines = [f"{_key(key)} = {in_line(value)}" for key, value in tables.items() if key != "expect"]
    if expect := tables.get("expect"):
        lines += ["", "[expect]", *(f"{_key(key)} = {in_line(expect[key])}" for key in expect)]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key)
    return key if bare else in_line(key)


def in_line(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, str):  # TOML, unlike JSON, escapes the delete character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {in_line(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(in_line, value))}]"
    return repr(value)
