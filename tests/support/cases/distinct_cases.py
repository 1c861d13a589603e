"""Random scenarios in which no two ranks are alike: simulated by columns, and by events.

`python -m tests.measured.distinct_ranks` counts those that are simulated by columns, and prints
each whose times differ.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import zsim
from tests.support.cases.situations import cases
from zsim.engine.columns.rounds import in_columns
from zsim.engine.costs.op_costs import Costs
from zsim.engine.faults.faulty_program import faulty_program
from zsim.engine.simulate_step import prepared_step, timeline_of, timeline_of_many
from zsim.memory.full_device import filled
from zsim.scenario.plan import planned

SIMILAR = (
    "fsdp2", "fsdp1", "ddp", "zero1", "zero2", "zero3", "zero_redundancy", "deepspeed1",
    "deepspeed2", "deepspeed3",
)
"""Strategies whose ranks may all have the same ops and one communicator."""
PAUSES = ("step_overhead", "micro_batch_overhead", "issue_kernel")
MEANS = ("300 ns", "20 us", "700 us", "20 ms")


@st.composite
def with_distinct_ranks(draw: st.DrawFn, strategies: tuple[str, ...] = SIMILAR) -> zsim.Scenario:
    """A scenario of one of the `strategies` on up to 16 ranks with jitter of some kind. A rank may
    be slow or late besides, and the trainer may pause."""
    scenario, _ = draw(cases(draw(st.sampled_from(strategies)), two_nodes=draw(st.booleans())))
    faults: list[dict[str, Any]] = [{
        "kind": "jitter", "mean": draw(st.sampled_from(MEANS)),
        "each": draw(st.sampled_from(["op", "op", "step"])), "seed": draw(st.integers(0, 10**6)),
        "distribution": draw(st.sampled_from(["exponential", "uniform"])),
    }]
    rank = st.integers(0, scenario.world_size - 1)
    if draw(st.booleans()):
        factor = draw(st.sampled_from([1.01, 1.3, 4.0]))
        faults.append({"kind": "slow_rank", "rank": draw(rank), "factor": factor})
    if draw(st.booleans()):
        faults.append({
            "kind": "late_start", "rank": draw(rank), "by": draw(st.sampled_from(MEANS)),
        })
    paused = draw(st.lists(st.sampled_from(PAUSES), unique=True))
    execution = {key: draw(st.sampled_from(["2 us", "200 us", "3 ms"])) for key in paused}
    return scenario.with_(faults=faults, execution=execution)


def outcome(scenario: zsim.Scenario) -> str:
    """"equal" or "differs", to the nanosecond of each op on each rank, or "events" where columns do
    not do."""
    program = faulty_program(filled(planned(scenario)).program, scenario.faults)
    costs, others = (Costs(cluster=scenario.cluster, execution=scenario.executed) for _ in range(2))
    distinct = prepared_step(program, costs=costs)
    if not in_columns(distinct):
        return "events"
    columns = timeline_of_many(distinct, scenario.faults, costs=costs)
    prepared = prepared_step(program, costs=others)
    events = timeline_of(prepared, costs=others, faults=scenario.faults)
    return "equal" if events == columns else "differs"
