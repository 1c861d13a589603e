"""A scenario's tables: plain data as TOML has it, from a file or from Python; merged, and as TOML.

It knows which keys exclude one another, and that a quantity of Python in `expect` is an equality.
It knows no other key's meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from numbers import Integral
from os import PathLike, fsdecode
from os.path import isabs, join, relpath
from typing import Any, TypedDict, TypeVar

from zsim.io.quantities import Bytes, Duration

F = TypeVar("F", bound=Callable[..., Any])
Table = Mapping[str, Any]


class Tables(TypedDict, total=False):
    """The tables of a scenario from Python, in the order in which a file has them; None for one
    that is not there."""

    description: str | None
    model: Table | None
    batch: Table | None
    cluster: Table | None
    strategy: Table | None
    precision: Table | None
    optimizer: Table | None
    offload: Table | None
    activation_checkpointing: Table | None
    wrapping: Table | None
    execution: Table | None
    faults: Sequence[Table] | None
    allocator: Table | None
    frozen: Sequence[str] | None
    checkpoint: Table | None
    steps: int | None
    seed: int | None
    expect: Table | None
    lint: Table | None


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


FILES = (("model", "huggingface"), ("model", "traced"), ("cluster", "file"))
"""Table and key of the files that a scenario names, relative to its folder."""


def seen_from(
    folder: str | PathLike[str] | None, tables: Mapping[str, Any], own: str
) -> dict[str, Any]:
    """The `tables` of a scenario in the folder `own`, which name the same files from `folder`;
    None for `own`."""
    moved = dict(tables)
    for table, key in FILES:
        file = moved.get(table, {}).get(key)
        if file and folder is not None and not isabs(file):
            moved[table] = {**moved[table], key: relpath(join(own, file), folder)}
    return moved


def in_order(tables: Tables) -> dict[str, Any]:
    """`tables` in the order of a file, and after them what is none of a scenario's."""
    written: dict[str, Any] = dict(tables)
    known = {name: written.pop(name) for name in Tables.__annotations__ if name in written}
    return known | written


def in_signature(default: Any) -> Callable[[F], F]:
    """Decorator of a method that takes Tables: its signature names each, with this default, so that
    `help` and a notebook's completion do."""

    def name_each(method: F) -> F:
        own = signature(method)
        tables = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=of.__forward_arg__)
            for name, of in Tables.__annotations__.items()
        ]
        this, *others, _ = own.parameters.values()
        shown = own.replace(parameters=[this, *tables, *others])
        setattr(method, "__signature__", shown)  # noqa: B010  mypy knows no such attribute
        return method

    return name_each


def plain(value: Any, problems: list[str], key: str = "") -> Any:
    """`value` of Python as TOML would have it: tuples as lists, paths and quantities as text,
    without None.

    `problems` gets a line for each value that no TOML text can hold.
    """
    match value:
        case Mapping():
            return {
                str(name): plain(inner, problems, f"{key}.{name}" if key else str(name))
                for name, inner in value.items()
                if inner is not None
            }
        case list() | tuple():
            return [plain(inner, problems, f"{key}[{i}]") for i, inner in enumerate(value)]
        case bool():
            return value
        case Bytes() | Duration():
            exact = f"{int(value)} {'B' if isinstance(value, Bytes) else 'ns'}"
            return f"== {exact}" if key.startswith("expect.") else exact
        case Integral():  # an int, an IntEnum, an int of numpy
            return int(value)
        case float():
            return float(value)
        case str() | PathLike():
            return fsdecode(value)
    expected = "text, a number, true or false, a list or a table"
    problems.append(f"{key[:100]}: expected {expected}, found a value of type "
                    f"{type(value).__name__}")
    return None


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
