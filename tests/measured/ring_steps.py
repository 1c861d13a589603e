"""Rings as steps against flows: `python -m tests.measured.ring_steps --out FILE`.

Random collectives at once (`tests.support.ring_cases`), each simulated in both details. The record
has how many differ, by how much and why; the exit status is 1 where a law is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.ring_cases import REASONS, breaches, compared, drawn, reason
from zsim.version import __version__

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles of the ratio that are recorded."""
Outcome = tuple[str, float, str, list[str], float]
"""Reason, steps over flows, the case as text, laws that it breaks, and seconds of computing."""


def outcome(seed: int) -> Outcome:
    """The case of that number in both details."""
    before = time.process_time()
    case = drawn(seed)
    times = compared(case)
    why, broken = reason(case, times), list(breaches(case, times))
    return why, times.ratio, f"{seed}: {case}", broken, time.process_time() - before


def table(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Number, ratio of steps to flows and extreme cases by reason."""
    rows: dict[str, Any] = {}
    for why, means in REASONS.items():
        own = sorted((ratio, text) for kind, ratio, text, *_ in outcomes if kind == why)
        rows[why] = {"means": means, "cases": len(own)}
        if own and why != "equal":
            rows[why]["steps over flows"] = {
                f"{share:.0%}": round(own[int(share * (len(own) - 1))][0], 4) for share in SHARES
            }
            rows[why] |= {"smallest": own[0][1], "largest": own[-1][1]}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.jobs) as pool:
        outcomes = list(pool.map(outcome, range(asked.cases), chunksize=20))
    broken = [breach for *_, own, _ in outcomes for breach in own]
    ratios = sorted(ratio for _, ratio, *_ in outcomes)
    record = {
        "command": f"python -m tests.measured.ring_steps --cases {asked.cases}",
        "date": time.strftime("%Y-%m-%d"),
        "zsim": __version__,
        "cases": asked.cases,
        "seconds_of_computing": round(sum(seconds for *_, seconds in outcomes)),
        "broke a law": broken,
        "steps over flows": {
            f"{share:.0%}": round(ratios[int(share * (len(ratios) - 1))], 4) for share in SHARES
        },
        "by reason": table(outcomes),
    }
    text = json.dumps(record, indent=1) + "\n"
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
