"""Random scenarios of 16 to 60 equal layers: simulated without most of them, and whole.

`python -m tests.measured.equal_layers` counts those that are so simulated, and prints each whose
times differ.
"""

from __future__ import annotations

from hypothesis import reject
from hypothesis import strategies as st

import zsim
from tests.support.cases.situations import cases
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import (
    is_settled,
    prepared_step,
    timeline_of,
    timeline_of_few,
)
from zsim.memory.full_device import filled
from zsim.scenario.plan import planned

RECURRING = ("fsdp2", "hsdp", "fsdp1", "ddp", "zero1", "zero2", "zero3")
"""Strategies whose layers mostly have equal ops."""
NUMBERS = (16, 19, 24, 31, 32, 33, 40, 48, 60)


@st.composite
def with_layers(draw: st.DrawFn, strategies: tuple[str, ...] = RECURRING) -> zsim.Scenario:
    """A scenario of one of the `strategies` with 16 to 60 layers, on one node or two."""
    scenario, _ = draw(cases(draw(st.sampled_from(strategies)), two_nodes=draw(st.booleans())))
    sizes, layers = dict(scenario.tables["model"]["sizes"]), draw(st.sampled_from(NUMBERS))
    if "dims" in sizes:
        sizes["dims"] = [*sizes["dims"][:2], *[sizes["dims"][1]] * (layers - 1)]
    else:
        sizes["num_layers"] = layers
    try:
        return scenario.with_(model={**scenario.tables["model"], "sizes": sizes})
    except zsim.ScenarioError:  # so many layers need more than the host has
        reject()


def outcome(scenario: zsim.Scenario) -> str:
    """"equal" or "differs", to the nanosecond of each op, or "all" where all layers are simulated.
    """
    case = filled(planned(scenario))
    few, whole = (Costs(cluster=scenario.cluster, execution=scenario.executed) for _ in range(2))
    timeline = timeline_of_few(case.program, costs=few, contention=True, settled=is_settled)
    if timeline is None:
        return "all"
    prepared = prepared_step(case.program, costs=whole)
    return "equal" if timeline == timeline_of(prepared, costs=whole) else "differs"
