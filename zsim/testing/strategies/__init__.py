"""Hypothesis strategies of sizes, parameters, meshes, models, clusters, scenarios, faults and
Programs.

They shrink to small ones, and a failing scenario is printed as TOML.
"""

from zsim.testing.strategies.faults import DELAYING, fault_plans
from zsim.testing.strategies.scenarios import (
    clusters_of,
    models,
    programs,
    scenario_tables,
    scenarios,
)
from zsim.testing.strategies.sizes import (
    DrawnParameter,
    meshes,
    numels,
    param_groups,
    parameters,
    shapes,
    unit_trees,
    world_sizes,
)

__all__ = [
    "DELAYING", "DrawnParameter", "clusters_of", "fault_plans", "meshes", "models", "numels",
    "param_groups", "parameters", "programs", "scenario_tables", "scenarios", "shapes",
    "unit_trees", "world_sizes",
]
