"""Random scenarios that are simulated in two ways, counted by whether their times are equal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

import zsim
from zsim.version import __version__

Scenarios = Callable[[str], SearchStrategy[zsim.Scenario]]
"""Scenarios of the strategy named; a function of a module, as other processes call it."""
Outcome = Callable[[zsim.Scenario], str]
""""equal" or "differs" in their times, or the reason for which one way does not apply."""


def share(
    strategy: str, scenarios: Scenarios, outcome: Outcome, number: int, first_seed: int
) -> tuple[Counter[str], float]:
    """Counts of outcomes among `number` scenarios of a strategy, and seconds of computing."""
    before, met = time.process_time(), Counter[str]()

    @seed(first_seed)
    @settings(
        max_examples=number, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios(strategy))
    def each(scenario: zsim.Scenario) -> None:
        kind = outcome(scenario)
        met[kind] += 1
        if kind == "differs":
            sys.stdout.write(scenario.to_toml() + "\n")

    each()
    return met, time.process_time() - before


def count(
    description: str | None, strategies: Sequence[str], scenarios: Scenarios, outcome: Outcome, *,
    each: int,
) -> int:
    """The command of a record: print the counts, write them to `--out`; 1 where a time differs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--each", type=int, default=each, help="scenarios of each strategy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    of_one = partial(
        share, scenarios=scenarios, outcome=outcome, number=asked.each, first_seed=asked.seed
    )
    with ProcessPoolExecutor(asked.jobs) as pool:
        shares = list(pool.map(of_one, strategies))
    met: Counter[str] = sum((own for own, _ in shares), Counter())
    record = {
        "zsim": __version__, "seed": asked.seed, "scenarios": sum(met.values()),
        "outcomes": dict(sorted(met.items())),
        "by strategy": {
            name: dict(sorted(own.items()))
            for name, (own, _) in zip(strategies, shares, strict=True)
        },
        "seconds of computing": round(sum(seconds for _, seconds in shares)),
    }
    text = json.dumps(record, indent=1) + "\n"
    sys.stdout.write(text)
    if asked.out:
        asked.out.write_text(text)
    return 1 if met["differs"] else 0
