"""Random scenarios of 7 to 12 micro-batches: from five of them, and all simulated.

`python -m tests.support.cases.micro_batch_cases 1000` counts those that are taken from five, and
prints each whose figures differ.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import zsim
from tests.support.cases.situations import cases
from zsim.analysis.assessed import drafted_of_few, of_planned
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned
from zsim.testing.strategies.tables import STRATEGIES


@st.composite
def with_micro_batches(draw: st.DrawFn) -> zsim.Scenario:
    """A scenario of any strategy with 7 to 12 micro-batches."""
    name = draw(st.sampled_from(STRATEGIES))
    scenario, _ = draw(cases(name, two_nodes=draw(st.booleans())))
    accumulation = draw(st.integers(7, 12))
    return derived(scenario, batch=replace(scenario.batch, accumulation=accumulation))


def outcome(scenario: zsim.Scenario) -> str:
    """"equal" or "differs", to the byte and the nanosecond, or "all" where all are simulated."""
    drafted = drafted_of_few(scenario)
    few = drafted and drafted.figures()
    if drafted is None or few is None:
        return "all"
    whole = of_planned(planned(scenario))
    memory, step = whole
    assert step is not None
    assert drafted.floor.nbytes <= memory.needed.nbytes
    assert drafted.floor.ns <= step.ns
    return "equal" if few == whole else "differs"


def main() -> int:
    counts, seconds = Counter[tuple[str, str]](), Counter[str]()

    @seed(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    @settings(
        max_examples=int(sys.argv[1]), database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(with_micro_batches())
    def each(scenario: zsim.Scenario) -> None:
        begin = time.process_time()
        kind = outcome(scenario)
        seconds[kind] += time.process_time() - begin
        counts[scenario.strategy, kind] += 1
        if kind == "differs":
            sys.stdout.write(scenario.to_toml() + f"# accumulation {scenario.batch.accumulation}\n")

    each()
    sys.stdout.write("".join(f"{key}: {count}\n" for key, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
