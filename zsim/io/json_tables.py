"""Tables of JSON from anywhere, made into objects by pydantic, and its complaints as ours."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Strict, TypeAdapter, ValidationError, create_model
from pydantic import Field as Limits

from zsim.errors import listed, visible
from zsim.io import pydantic_words
from zsim.io.limits import MAX_INT

STRICT: dict[Any, Any] = {
    bool: Annotated[bool, Strict()],
    int: Annotated[int, Strict(), Limits(ge=-MAX_INT, le=MAX_INT)],
    float: Annotated[float, Strict()],
    str: Annotated[str, Strict(), AfterValidator(visible)],
}
"""Schemas of scalars: a number is no text, and text may be shown on a terminal."""


@cache
def reader(kind: Any) -> TypeAdapter[Any]:
    """The reader of a dataclass whose fields are scalars, tuples, mappings, None and dataclasses,
    as its annotations say."""
    return TypeAdapter(_schema(kind))


def _schema(kind: Any) -> Any:
    arguments = get_args(kind)
    if kind in STRICT:
        return STRICT[kind]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return table_of(kind, **{key.name: _key(hints[key.name], key) for key in fields(kind)})
    if NoneType in arguments:
        return _schema(next(part for part in arguments if part is not NoneType)) | None
    if get_origin(kind) is tuple:
        return tuple.__class_getitem__(
            tuple(part if part is Ellipsis else _schema(part) for part in arguments)
        )
    return dict.__class_getitem__((STRICT[str], _schema(arguments[1])))


def _key(hint: Any, field: Field[Any]) -> Any:
    """The schema of a key, with its default where it may be left out."""
    if field.default_factory is not MISSING:
        return _schema(hint), Limits(default_factory=field.default_factory)
    return _schema(hint) if field.default is MISSING else (_schema(hint), field.default)


def table_of(make: Callable[..., Any], **types: Any) -> Any:
    """A table with these keys, optional where a type comes with a default; `make` makes an object
    of it."""
    keys: dict[str, Any] = {
        key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in types.items()
    }
    schema: Any = create_model("Table", __config__=ConfigDict(extra="forbid"), **keys)
    return Annotated[schema, AfterValidator(lambda table: make(**dict(table)))]


def complaint(error: ValidationError, *, signs: Collection[str] = ()) -> tuple[str, str, str]:
    """The key that pydantic complains of first, as in `units[0].fqn`, what it expected and what it
    found.

    `signs` are first items of rows, which choose a row's schema and are no keys.
    """
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    steps = [
        f"[{step}]" if isinstance(step, int) else f".{step[:60]}"
        for step in first["loc"]
        if step not in signs
    ]
    expected = pydantic_words.expected_text(first)
    if kind == "extra_forbidden":
        expected = "no such key"
    elif kind.startswith("union_tag"):
        expected = f"a row that begins with {listed(signs)}"
    return "".join(steps).removeprefix("."), expected, pydantic_words.found_text(first)
