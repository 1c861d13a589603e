"""Rings as steps against flows: `python -m tests.measured.ring_steps --out FILE`.

Random collectives at once (`tests.support.cases.ring_cases`), each simulated in both details. The
record has how many differ, by how much and why, and what late and slow ranks and links change.
The exit status is 1 where a law is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cases.ring_cases import REASONS, TROUBLES, breaches, compared, drawn, reason
from zsim.version import __version__

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles of the ratio that are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A case in both details: as text, with laws that it breaks and seconds of computing."""

    why: str
    trouble: str
    ratio: float
    text: str
    broken: tuple[str, ...]
    seconds: float


def outcome(seed: int) -> Outcome:
    """The case of that number in both details."""
    before = time.process_time()
    case = drawn(seed)
    times = compared(case)
    return Outcome(
        why=reason(case, times), trouble=case.trouble, ratio=times.ratio, text=f"{seed}: {case}",
        broken=tuple(breaches(case, times)), seconds=time.process_time() - before,
    )


def table(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Number, ratio of steps to flows and extreme cases by reason."""
    rows: dict[str, Any] = {}
    for why, means in REASONS.items():
        own = sorted((each.ratio, each.text) for each in outcomes if each.why == why)
        rows[why] = {"means": means, "cases": len(own)}
        if own and why != "equal":
            rows[why]["steps over flows"] = quantiles([ratio for ratio, _ in own])
            rows[why] |= {"smallest": own[0][1], "largest": own[-1][1]}
    return rows


def by_trouble(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Number, ratio of steps to flows and reasons by what is wrong with a rank or a link."""
    rows: dict[str, Any] = {}
    for trouble in dict.fromkeys(TROUBLES):
        own = [each for each in outcomes if each.trouble == trouble]
        reasons = Counter(each.why for each in own)
        rows[trouble] = {
            "cases": len(own), "steps over flows": quantiles([each.ratio for each in own]),
            "reasons": {why: reasons[why] for why in REASONS if reasons[why]},
        } if own else {"cases": 0}
    return rows


def quantiles(ratios: Sequence[float]) -> dict[str, float]:
    """The recorded quantiles, by their share."""
    ordered = sorted(ratios)
    return {f"{share:.0%}": round(ordered[int(share * (len(ordered) - 1))], 4) for share in SHARES}


def main() -> int:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.jobs) as pool:
        outcomes = list(pool.map(outcome, range(asked.cases), chunksize=20))
    broken = [breach for each in outcomes for breach in each.broken]
    record = {
        "command": f"python -m tests.measured.ring_steps --cases {asked.cases}",
        "date": time.strftime("%Y-%m-%d"),
        "zsim": __version__,
        "cases": asked.cases,
        "seconds_of_computing": round(sum(each.seconds for each in outcomes)),
        "broke a law": broken,
        "steps over flows": quantiles([each.ratio for each in outcomes]),
        "by trouble": by_trouble(outcomes),
        "by reason": table(outcomes),
    }
    text = json.dumps(record, indent=1) + "\n"
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
