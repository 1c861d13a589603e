"""The JSON Schema of scenario files, with the meaning of each key.

The options of strategies and families mean what is written below them in their dataclasses.
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from textwrap import dedent
from typing import Any

from pydantic import BaseModel

from zsim.cluster.cluster_presets import clusters
from zsim.models.families import FAMILIES, presets
from zsim.scenario.expect import FIGURES
from zsim.scenario.keys.fault_tables import FAULT_TABLES
from zsim.scenario.keys.options import sizes_table, strategy_table
from zsim.scenario.keys.tables import ScenarioTable
from zsim.strategies import STRATEGIES


def json_schema() -> dict[str, Any]:
    """The JSON Schema of scenario files: one variant of `strategy` per strategy, of `model` per
    family and source."""
    schema = ScenarioTable.model_json_schema()
    schema["title"] = "zsim scenario"
    schema["properties"]["strategy"] = {
        "oneOf": [strategy_schema(name) for name in STRATEGIES]
    }
    schema["properties"]["faults"]["items"] = {
        "oneOf": [table.model_json_schema() for table in FAULT_TABLES.values()]
    }
    model = schema["$defs"]["ModelTable"]["properties"]
    cluster = schema["$defs"]["ClusterTable"]["properties"]
    sizes = [sizes_schema(name) for name in FAMILIES]
    for table, key, values in (
        (model, "preset", {"enum": list(presets()), "title": "Preset"}),
        (model, "family", {"enum": list(FAMILIES), "title": "Family"}),
        (model, "sizes", {"anyOf": sizes}),
        (cluster, "preset", {"enum": list(clusters()), "title": "Preset"}),
    ):
        table[key] = values | {"description": table[key]["description"]}
    schema["properties"]["expect"]["propertyNames"] = {"enum": list(FIGURES)}
    return schema


def strategy_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of `strategy` for one strategy."""
    return _described(strategy_table(name), STRATEGIES[name].options)


def sizes_schema(family: str) -> dict[str, Any]:
    """The JSON Schema of `model.sizes` for one family."""
    return _described(sizes_table(family), FAMILIES[family].sizes)


def _described(table: type[BaseModel], options: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a table, with the meanings of the options that it is made of."""
    schema = table.model_json_schema()
    for key, meaning in _meanings(options).items():
        entry = schema["properties"][key] | {"description": meaning}
        schema["properties"][key] = dict(sorted(entry.items()))  # as pydantic has them
    return schema


def _meanings(options: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass."""
    meanings: dict[str, str] = {}
    for kind in reversed(options.__mro__[:-1]):
        (definition,) = ast.parse(dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                meanings[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return meanings
