"""Tables of scenarios as data: what each key may be, and what a table becomes that is as it should
be.

`Table.taken` holds a table to its keys without pydantic, which takes 70 ms to load. Where it finds
anything amiss, or is not sure, `zsim.scenario.keys.complaints` asks pydantic for all that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import cache
from math import isfinite
from operator import ge, gt, le, lt
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from zsim.io.units import parse_time

MAX_NAME = 200
"""The most characters of a name or a pattern."""
MOST_FAULTS = 64
"""The most entries of `faults`."""
MAX_PAUSE_NS = 3600 * 10**9
"""The longest pause of the trainer, or delay of a rank, in ns: an hour."""


WITHIN: Mapping[str, Callable[[Any, Any], bool]] = {
    "ge": ge, "gt": gt, "le": le, "lt": lt,
    "max_length": lambda value, most: len(value) <= most,
}
"""Bounds by pydantic's names."""


class UnsureError(Exception):
    """A table that pydantic is to judge."""


class ValueBounds:
    """Bounds of a kind of values, by the names in `WITHIN`, and its meaning, `description`.
    In `Annotated` it stands beside functions that raise ValueError for a value that is none."""

    def __init__(self, **named: Any) -> None:
        self.named = named


class Key(NamedTuple):
    """A key of a table: its values, its default (MISSING where there is none), and its bounds."""

    kind: Any
    default: Any
    bounds: Mapping[str, Any]


class Table:
    """The keys of a table that `make` makes something of; `name` and `meaning` are for its users.

    >>> table = Table("BatchTable", "A batch.", {"micro_batch": Key(int, MISSING, {"ge": 1})})
    >>> table.taken({"micro_batch": 2}).micro_batch
    2
    """

    def __init__(
        self, name: str, meaning: str | None, keys: Mapping[str, Key],
        make: Callable[..., Any] = SimpleNamespace,
    ) -> None:
        self.name, self.meaning, self.keys, self.make = name, meaning, keys, make

    def taken(self, table: object) -> Any:
        """The `table` as `make` makes it, with defaults; UnsureError where a key or value may be
        wrong."""
        if type(table) is not dict or not table.keys() <= self.keys.keys():
            raise UnsureError
        return self.make(**{
            name: _taken(key.kind, key.bounds, table[name]) if name in table else _default(key)
            for name, key in self.keys.items()
        })


def key(default: Any = MISSING, meaning: str = "", **bounds: Any) -> Any:
    """A field of a dataclass that `table_of` makes a table of."""
    metadata = {"bounds": ({"description": meaning} if meaning else {}) | bounds}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def table_of(kind: type[Any]) -> Table:
    """The table that becomes the dataclass `kind`, whose fields are keys."""
    hints = get_type_hints(kind, include_extras=True)
    keys = {
        own.name: Key(
            hints[own.name],
            own.default if own.default_factory is MISSING else own.default_factory(),
            own.metadata.get("bounds", {}),
        )
        for own in fields(kind)
    }
    return Table(kind.__name__, kind.__doc__, keys, kind)


def table_in(kind: Any) -> Table | None:
    """The table that values of a `kind` are; None for any other kind."""
    if isinstance(kind, Table):
        return kind
    return table_of(kind) if hasattr(kind, "__dataclass_fields__") else None


def _default(key: Key) -> Any:
    if key.default is MISSING:
        raise UnsureError
    return key.default.taken({}) if isinstance(key.default, Table) else key.default


def _taken(kind: Any, bounds: Mapping[str, Any], value: Any) -> Any:
    """`value` as one of `kind` and within `bounds`; UnsureError where it may be none."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _checked(arguments, bounds, value)
    if origin in (Union, UnionType):
        return _any_of(arguments, bounds, value)
    if origin is Literal:
        if any(type(value) is type(each) and value == each for each in arguments):
            return value
        raise UnsureError
    if (table := table_in(kind)) is not None:
        return table.taken(value)
    if origin is tuple:
        value = tuple(_taken(arguments[0], {}, each) for each in _list(value))
    elif origin is dict:
        _require(type(value) is dict)
        value = {_taken(arguments[0], {}, name): _taken(arguments[1], {}, each)
                 for name, each in value.items()}
    elif kind is float and type(value) in (int, float):
        value = float(value)
        _require(isfinite(value))
    elif kind is Any:
        return frozen(value)
    else:
        _require(type(value) is kind)
    _require(value is None or _within(bounds, value))
    return value


def _checked(arguments: tuple[Any, ...], bounds: Mapping[str, Any], value: Any) -> Any:
    """The value of an Annotated kind: within its ValueBounds, and as its functions return it."""
    kind, *extras = arguments
    for extra in extras:
        if isinstance(extra, ValueBounds):
            bounds = {**extra.named, **bounds}
    value = _taken(kind, bounds, value)
    for check in extras:
        if not isinstance(check, ValueBounds):
            try:
                value = check(value)
            except ValueError:  # of which those of units are too
                raise UnsureError from None
    return value


def _any_of(kinds: tuple[Any, ...], bounds: Mapping[str, Any], value: Any) -> Any:
    for kind in kinds:
        try:
            return _taken(kind, {} if kind is NoneType else bounds, value)
        except UnsureError:
            continue
    raise UnsureError


def _within(bounds: Mapping[str, Any], value: Any) -> bool:
    return all(
        WITHIN[name](value, bound) for name, bound in bounds.items() if name != "description"
    )


def frozen(value: object) -> object:
    """Lists as tuples, as tables keep them."""
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    return tuple(frozen(inner) for inner in value) if isinstance(value, list) else value


def _list(value: object) -> Any:
    _require(type(value) in (list, tuple))
    return value


def _require(fits: bool) -> None:
    if not fits:
        raise UnsureError


def _pause(value: str) -> str:
    if parse_time(value) > MAX_PAUSE_NS:
        raise ValueError("expected at most an hour")
    return value


Pause = Annotated[str, _pause]


def _delay(value: str) -> str:
    if not parse_time(value):
        raise ValueError("expected more than 0 ns")
    return value


Delay = Annotated[Pause, _delay]
