"""The JSON Schema of scenario files, for editors."""

from __future__ import annotations

from typing import Any

from zsim.cluster.cluster import clusters
from zsim.models.families import FAMILIES, presets
from zsim.scenario.expect import FIGURES
from zsim.scenario.keys.fault_tables import FAULT_TABLES
from zsim.scenario.keys.models import model_of
from zsim.scenario.keys.schema import SCENARIO, sizes_table, strategy_table
from zsim.strategies import STRATEGIES


def json_schema() -> dict[str, Any]:
    """The JSON Schema of scenario files: one variant of `strategy` per strategy, of `model` per
    family and source."""
    schema = model_of(SCENARIO).model_json_schema()
    schema["title"] = "zsim scenario"
    schema["properties"]["strategy"] = {
        "oneOf": [model_of(strategy_table(name)).model_json_schema() for name in STRATEGIES]
    }
    schema["properties"]["faults"]["items"] = {
        "oneOf": [model_of(table).model_json_schema() for table in FAULT_TABLES.values()]
    }
    model = schema["$defs"]["ModelTable"]["properties"]
    cluster = schema["$defs"]["ClusterTable"]["properties"]
    sizes = [model_of(sizes_table(name)).model_json_schema() for name in FAMILIES]
    for table, key, values in (
        (model, "preset", {"enum": list(presets()), "title": "Preset"}),
        (model, "family", {"enum": list(FAMILIES), "title": "Family"}),
        (model, "sizes", {"anyOf": sizes}),
        (cluster, "preset", {"enum": list(clusters()), "title": "Preset"}),
    ):
        table[key] = values | {"description": table[key]["description"]}
    schema["properties"]["expect"]["propertyNames"] = {"enum": list(FIGURES)}
    return schema
