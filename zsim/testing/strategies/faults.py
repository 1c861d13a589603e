"""Plans of faults for a scenario: each fault is of a rank, an op or a link that is there."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from zsim.engine.faults.fault import FAULT_KINDS
from zsim.ir.ops import COLLECTIVES
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario
from zsim.testing.strategies.tables import Tables

DELAYING = ("slow_rank", "jitter", "late_start", "slow_link")
"""Kinds of faults with which a step takes longer and ends all the same."""
MOST_FAULTS = 4
TIMES = ("1 us", "300 us", "7 ms")


@st.composite
def fault_plans(
    draw: st.DrawFn, scenario: Scenario, kinds: tuple[str, ...] = tuple(FAULT_KINDS),
    fewest: int = 1,
) -> list[Tables]:
    """Lists of `fewest` to four tables that `scenario.with_(faults=…)` takes, of some `kinds`.

    They shrink to one slow rank. DELAYING are the kinds with which a step ends.
    """
    program = planned(scenario).program
    plan: list[Tables] = []
    for _ in range(draw(st.integers(fewest, MOST_FAULTS))):
        rank = draw(st.integers(0, scenario.world_size - 1))
        ops = program.of_rank(rank).steady
        names = [f"{op.kind} {op.unit}" for op in ops]
        joint = [
            name for name, op in zip(names, ops, strict=True)
            if op.kind in COLLECTIVES and program.mesh.size(op.group) > 1
        ]
        own: dict[str, st.SearchStrategy[Tables] | None] = {
            "slow_rank": _of(rank, factor=st.sampled_from([1.5, 1.01, 8.0])),
            "jitter": st.fixed_dictionaries({
                "mean": st.sampled_from(TIMES), "each": st.sampled_from(["step", "op"]),
                "distribution": st.sampled_from(["exponential", "uniform"]),
                "seed": st.integers(0, 9),
            }),
            "late_start": _of(rank, by=st.sampled_from(TIMES)),
            "failure": _of(rank, at=st.sampled_from(names)),
            "skipped_collective": _of(rank, at=st.sampled_from(joint)) if joint else None,
            "reordered_collective": (
                _of(rank, at=st.sampled_from(joint[:-1])) if len(joint) > 1 else None
            ),
            "slow_link": _link(scenario, bandwidth=st.just("100 Mbit/s")),
            "lost_link": _link(scenario),
        }
        able = [kind for kind in kinds if own[kind] is not None]
        if able:
            kind = draw(st.sampled_from(able))
            table = own[kind]
            assert table is not None
            plan.append({"kind": kind, **draw(table)})
    return [fault for index, fault in enumerate(plan) if not _told(fault, plan[:index])]


def _of(rank: int, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Tables]:
    return st.fixed_dictionaries({"rank": st.just(rank), **keys})


def _link(
    scenario: Scenario, **keys: st.SearchStrategy[Any]
) -> st.SearchStrategy[Tables] | None:
    """A link of the scenario's cluster; None where its nodes have no NICs."""
    cluster = scenario.cluster
    if not cluster.nics_per_node:
        return None
    return st.fixed_dictionaries({
        "node": st.integers(0, cluster.num_nodes - 1),
        "nic": st.integers(0, cluster.nics_per_node - 1), **keys,
    })


def _told(fault: Tables, earlier: list[Tables]) -> bool:
    """True where a scenario refuses `fault` beside the earlier ones: each link, each op of a rank
    and each rank's own fault is told once."""
    keys = ("node", "nic") if "nic" in fault else ("rank", "at" if "at" in fault else "kind")
    return any(all(fault.get(key) == each.get(key) for key in keys) for each in earlier)
