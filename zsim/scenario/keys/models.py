"""Tables of scenarios as pydantic's models, for complaints about them and for their JSON Schema."""

from __future__ import annotations

from dataclasses import MISSING
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from zsim.scenario.keys.table import Key, Table, ValueBounds, table_in


class TableModel(BaseModel):
    """Base of every model: strict types, no unknown keys, finite numbers.

    Most are checked inside a larger one. The others build their validators when they are used.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )


@cache
def model_of(table: Table) -> type[BaseModel]:
    """The model of a table."""
    keys: dict[str, Any] = {name: _field(key) for name, key in table.keys.items()}
    return create_model(table.name, __base__=TableModel, __doc__=table.meaning, **keys)


def made(table: Table, values: BaseModel) -> Any:
    """The object that `table` makes of a model that is checked."""
    return table.make(**{
        name: _made(key.kind, getattr(values, name)) for name, key in table.keys.items()
    })


def _made(kind: Any, value: Any) -> Any:
    if not isinstance(value, BaseModel):
        return value
    inner = next(filter(None, map(table_in, (kind, *get_args(kind)))))
    return made(inner, value)


def _field(key: Key) -> tuple[Any, Any]:
    default = ... if key.default is MISSING else key.default
    if isinstance(default, Table):
        default = model_of(default)()
    return _kind(key.kind), Field(default, **key.bounds)


def _kind(kind: Any) -> Any:
    """A kind of values as pydantic has it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        extras = [
            Field(**extra.named) if isinstance(extra, ValueBounds) else AfterValidator(extra)
            for extra in arguments[1:]
        ]
        return Annotated[_kind(arguments[0]), *extras]
    if origin in (Union, UnionType):
        return reduce(or_, map(_kind, arguments))
    if origin is tuple:
        return tuple[_kind(arguments[0]), ...]  # type: ignore[misc]
    table = table_in(kind)
    return kind if table is None else model_of(table)
