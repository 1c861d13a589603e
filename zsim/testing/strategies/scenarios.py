"""Whole scenarios and Programs: every strategy with its options, on CPU and GPU clusters.

A failing example of a test is printed as TOML, ready to be saved as a scenario file.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import assume, note
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.ir.program import Program
from zsim.models.spec import ModelSpec
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES as TABLE
from zsim.testing.strategies.tables import (
    ENGINE,
    FAMILIES,
    FLAT_PARAMETER,
    PLAIN,
    SHARDED_ENGINE,
    STRATEGIES,
    Tables,
    checkpointing_tables,
    frozen_patterns,
    model_tables,
    offload_tables,
    runs_once,
    strategy_tables,
    wrapping_tables,
)

PRESETS = ("cpu-gloo", "dgx-a100", "pcie-box")
RANKS = (1, 2, 3, 4, 6, 8)
OPTIMIZERS: tuple[Tables, ...] = (
    {"name": "adamw"},
    {"name": "adamw", "implementation": "for-loop", "clip_norm": 1.0},
    {"name": "sgd", "momentum": 0.9},
)


@st.composite
def scenario_tables(
    draw: st.DrawFn, families: tuple[str, ...] = FAMILIES, strategies: tuple[str, ...] = STRATEGIES,
    sizes: tuple[int, ...] = RANKS,
) -> Tables:
    """The tables of a whole scenario that nothing refuses, on a number of ranks among `sizes`."""
    sizes = sizes if any(name not in PLAIN for name in strategies) else (1,)
    ranks, preset = draw(st.sampled_from(sizes)), draw(st.sampled_from(PRESETS))
    parameters = draw(st.sampled_from(["fp32", "bf16"]))
    precision = {"parameters": parameters, "reduce": draw(st.sampled_from(["fp32", parameters]))}
    optimizer, tables = draw(st.sampled_from(OPTIMIZERS)), draw(model_tables(families))
    model = tables["model"]
    # torch looks for gradients in the reduction's dtype, also of blocks that never ran
    casts = "unused" in model and parameters != precision["reduce"]
    sync = "every" if casts else draw(st.sampled_from(["every", "last"]))
    if parameters == "fp32" and draw(st.sampled_from([False, False, True])):
        precision["autocast"] = "bf16"
    flat = ranks > 1 and runs_once(tables) and "unused" not in model and "autocast" not in precision
    once = tables["batch"]["forwards"] == 1 and "unused" not in model
    engine = once and "autocast" not in precision
    plain = engine and ranks > 1 and runs_once(tables)
    fitting = tuple(
        name for name in strategies
        if (flat or name not in FLAT_PARAMETER) and (engine or name not in ENGINE)
        and (plain or name not in SHARDED_ENGINE) and (ranks == 1 or name not in PLAIN)
    )
    assume(fitting)
    strategy = draw(strategy_tables(ranks, fitting))
    offload = draw(offload_tables(strategy["name"]))
    frozen = draw(frozen_patterns(model, strategy=strategy["name"]))
    has_both = len(TABLE[strategy["name"]].syncs) > 1
    if strategy["name"] in SHARDED_ENGINE:
        again = {"mode": draw(st.sampled_from(["none", "full"]))}
        return {
            **tables, "cluster": {"preset": preset, "ranks": ranks}, "strategy": strategy,
            "precision": precision, "optimizer": optimizer, "offload": offload,
            "activation_checkpointing": again, "frozen": frozen,
        }
    again = draw(checkpointing_tables(model))
    if "autocast" in precision and "save" in again and not runs_once(tables):
        again = {}  # torch refuses it
    named: dict[str, Any] = {
        "activation_checkpointing": again,
        "wrapping": draw(
            wrapping_tables(model, strategy=strategy["name"], checkpointing=again)
        ),
        "frozen": frozen, "offload": offload,
    }
    return {
        **tables, **{key: value for key, value in named.items() if value},
        "cluster": {"preset": preset, "ranks": ranks},
        "strategy": {**strategy, "sync": sync} if has_both else strategy,
        "precision": precision, "optimizer": optimizer,
    }


def scenarios(
    families: tuple[str, ...] = FAMILIES, strategies: tuple[str, ...] = STRATEGIES
) -> st.SearchStrategy[Scenario]:
    """Scenarios, each noted as TOML where a test fails."""
    return scenario_tables(families, strategies).map(_made)


def programs(
    families: tuple[str, ...] = FAMILIES, strategies: tuple[str, ...] = STRATEGIES
) -> st.SearchStrategy[Program]:
    """Programs of drawn scenarios, for the scenarios' own clusters."""
    return scenarios(families, strategies).map(lambda scenario: planned(scenario).program)


def models(families: tuple[str, ...] = FAMILIES) -> st.SearchStrategy[ModelSpec]:
    """Models as data, with blocks that run several times or not at all among them."""
    return model_tables(families).map(
        lambda tables: Scenario(
            **tables, cluster={"preset": "cpu-gloo", "ranks": 1}, strategy={"name": "fsdp2"}
        ).model
    )


@st.composite
def clusters_of(draw: st.DrawFn, nodes: int = 4) -> ClusterSpec:
    """Presets of GPU clusters with one to `nodes` nodes."""
    names = [name for name in clusters() if name != "cpu-gloo"]
    return load_cluster(draw(st.sampled_from(names)), nodes=draw(st.integers(1, nodes)))


def _made(tables: Tables) -> Scenario:
    scenario = Scenario(**tables)
    with suppress(InvalidArgument):  # drawn outside of a test
        note(f"as a scenario file:\n{scenario.to_toml()}")
    return scenario
