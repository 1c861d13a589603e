"""The schemas of `strategy` and `model.sizes`, made of the options of what they name."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, Field, create_model

from zsim.io.units import UnitError, parse_bytes
from zsim.models.families import FAMILIES
from zsim.scenario.keys.table import MAX_SIZE, Table
from zsim.strategies import STRATEGIES
from zsim.strategies.flat_buffer.groups import Granularity

AXES = {
    "dp_shard": "Ranks that hold one copy of what is sharded; by default as many as there are.",
    "dp_replicate": "Copies, over which gradients are reduced; by default as many as fit.",
}
SYNC = 'Gradients are reduced after "every" micro-batch, or after the "last" alone.'


def _fields(options: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass as pydantic wants them: types and defaults. Sizes are bounded, by
    the `most` of a field's metadata where it has one."""
    hints = get_type_hints(options)
    kinds: dict[Any, Any] = {
        int: Annotated[int, Field(ge=0, le=MAX_SIZE)],
        float: Annotated[float, Field(ge=0, lt=1)],  # a share
        float | None: Annotated[float, Field(ge=0, le=MAX_SIZE)] | None,
        Granularity: BucketSize,
    }
    return {
        field.name: (
            Annotated[int, Field(ge=0, le=field.metadata["most"])]
            if "most" in field.metadata
            else kinds.get(hints[field.name], hints[field.name]),
            ... if field.default is MISSING else field.default,
        )
        for field in fields(options)
    }


def _bucket_size(written: str) -> str | int:
    """ "unit", "parameter", or a size in bytes from its text."""
    if written in ("unit", "parameter"):
        return written
    try:
        nbytes = parse_bytes(written)
    except UnitError:
        nbytes = 0
    if nbytes < 1:
        raise ValueError('expected "unit", "parameter" or a size as "25 MiB"')
    return nbytes


BucketSize = Annotated[str, AfterValidator(_bucket_size)]
"""A Granularity as scenarios write it."""


@cache
def strategy_table(name: str) -> type[BaseModel]:
    """The schema of `strategy` for one strategy: the common keys and the strategy's own options."""
    strategy = STRATEGIES[name]
    own: dict[str, Any] = {
        axis: (int | None, Field(None, ge=1, le=1_000_000, description=AXES[axis]))
        for axis in strategy.axes
    }
    own |= _fields(strategy.options)
    own["name"] = (Literal[name], Field(description="The strategy."))
    if strategy.syncs:
        own["sync"] = (Literal[strategy.syncs], Field(strategy.syncs[0], description=SYNC))
    return create_model(f"strategy {name}", __base__=Table, **own)


@cache
def sizes_table(family: str) -> type[BaseModel]:
    """The schema of `model.sizes` for one family."""
    return create_model(f"sizes of {family}", __base__=Table, **_fields(FAMILIES[family].sizes))
