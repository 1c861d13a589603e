"""Derived scenarios, as analyses try them: some parts are other objects, which no table has named
and nothing checks.

The tables follow, but for cluster and model, which have no such form: links twice as fast are an
assumption, no scenario's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

from zsim.ir.mesh import Mesh
from zsim.models.training_options import DTYPE_NAMES
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.flat_buffer.groups import Granularity

AS_THEY_ARE = {
    "batch": "batch", "optimizer": "optimizer", "checkpointing": "activation_checkpointing",
    "wrapping": "wrapping", "offload": "offload",
}
"""Parts whose tables have their fields as keys, and the names of the tables."""
WITH_UNIT = ("block_size",)
"""Fields in bytes, whose keys are text with a unit."""
OF_STRATEGY = ("strategy", "options", "mesh", "sync")


def derived(scenario: Scenario, **parts: Any) -> Scenario:
    """The scenario with some of its fields replaced by other objects."""
    made = object.__new__(Scenario)
    values = {slot.name: getattr(scenario, slot.name) for slot in fields(scenario)}
    if unknown := parts.keys() - values.keys():
        raise TypeError(f"expected fields of a Scenario, found {', '.join(sorted(unknown))}")
    values |= parts
    if "strategy" in parts and "format" not in scenario._tables.get("checkpoint", {}):
        form = STRATEGIES[parts["strategy"]].checkpoint_format
        values["checkpoint"] = replace(values["checkpoint"], format=form)
    values["_tables"] = _in_step(scenario._tables, values, parts)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _in_step(
    tables: Mapping[str, Any], parts: Mapping[str, Any], changed: Mapping[str, Any]
) -> dict[str, Any]:
    """`tables` with those written anew that the `changed` parts stand in; `parts` are all of them.
    """
    result = dict(tables)
    for part, table in AS_THEY_ARE.items():
        if part in changed:
            result[table] = _set_fields(changed[part])
    if "precision" in changed:
        precision = _set_fields(changed["precision"])
        result["precision"] = {
            key: DTYPE_NAMES.get(value, value) for key, value in precision.items()
        }
    if "checkpoint" in changed:
        result["checkpoint"] = {
            key: value for key, value in tables.get("checkpoint", {}).items()
            if getattr(changed["checkpoint"], key, value) == value
        }
    if changed.get("faults") == ():
        result.pop("faults", None)
    if "expandable_segments" in changed:
        result["allocator"] = {"expandable_segments": changed["expandable_segments"]}
    if any(part in changed for part in OF_STRATEGY):
        result["strategy"] = _strategy(**{part: parts[part] for part in OF_STRATEGY})
    return result


def _set_fields(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults, as TOML has them."""
    return {
        field.name: list(value) if isinstance(value, tuple)
        else f"{value} B" if field.name in WITH_UNIT else value
        for field in fields(part)
        if (value := getattr(part, field.name)) != field.default
    }


def _strategy(strategy: str, options: Any, mesh: Mesh, sync: str) -> dict[str, Any]:
    axes = {axis: getattr(mesh, axis) for axis in STRATEGIES[strategy].axes}
    hints = get_type_hints(type(options))
    own = {
        key: f"{value} B" if hints[key] == Granularity and isinstance(value, int) else value
        for key, value in _set_fields(options).items()
    }
    return {"name": strategy, **axes, **({} if sync == "every" else {"sync": sync}), **own}
