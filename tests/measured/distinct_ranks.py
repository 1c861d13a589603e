"""Steps of ranks that are all distinct, by columns against events: `python -m
tests.measured.distinct_ranks --out FILE`.

Random scenarios (tests.support.cases.distinct_cases), each simulated in both ways. The record
counts those that were equal to the nanosecond, and those that need events. The exit status is 1
where any time differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

import zsim
from tests.support.cases.distinct_cases import SIMILAR, outcome, with_distinct_ranks
from zsim.version import __version__


def share(strategy: str, number: int, first_seed: int) -> tuple[Counter[str], float]:
    """Counts of "equal", "events" and "differs" among `number` scenarios of a strategy, and seconds
    of computing."""
    before, met = time.process_time(), Counter[str]()

    @seed(first_seed)
    @settings(
        max_examples=number, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(with_distinct_ranks((strategy,)))
    def each(scenario: zsim.Scenario) -> None:
        kind = outcome(scenario)
        met[kind] += 1
        if kind == "differs":
            sys.stdout.write(scenario.to_toml() + "\n")

    each()
    return met, time.process_time() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=167, help="scenarios of each strategy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    count = len(SIMILAR)
    with ProcessPoolExecutor(asked.jobs) as pool:
        shares = list(pool.map(share, SIMILAR, [asked.each] * count, [asked.seed] * count))
    met: Counter[str] = sum((own for own, _ in shares), Counter())
    record = {
        "zsim": __version__, "seed": asked.seed, "scenarios": sum(met.values()),
        "outcomes": dict(sorted(met.items())),
        "by strategy": {
            name: dict(sorted(own.items()))
            for name, (own, _) in zip(SIMILAR, shares, strict=True)
        },
        "seconds of computing": round(sum(seconds for _, seconds in shares)),
    }
    text = json.dumps(record, indent=1) + "\n"
    sys.stdout.write(text)
    if asked.out:
        asked.out.write_text(text)
    return 1 if met["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
