"""Random scenarios through all laws: `python -m tests.measured.random_scenarios --out FILE`.

Each is simulated and held to every law of `zsim.testing.laws`, and to what its fault may do. The
record counts the situations that were hit; the exit status is 1 where some were hit too seldom.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.support.cases.situations import PAIRS, sweep, too_seldom
from zsim.testing.laws import LAWS
from zsim.version import __version__


def share(
    pair: tuple[str, str], each: int, first_seed: int
) -> tuple[Counter[str], list[str], float]:
    """The situations of a pair, what was wrong, and the seconds of computing."""
    before = time.process_time()
    return *sweep(each, [pair], first_seed=first_seed), time.process_time() - before


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=126, help="scenarios of each pair")
    parser.add_argument("--least", type=int, default=100, help="times that each must be hit")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    begin = time.perf_counter()
    met, wrong, computing = Counter[str](), list[str](), 0.0
    with ProcessPoolExecutor(asked.jobs) as pool:
        count = len(PAIRS)
        for own, breaches, seconds in pool.map(
            share, PAIRS, [asked.each] * count, [asked.seed] * count
        ):
            met, wrong, computing = met + own, wrong + breaches, computing + seconds
            sys.stderr.write(f"{met['scenarios']:,} scenarios, {computing:.0f} s\n")
            sys.stderr.writelines(f"{breach}\n" for breach in breaches)
    seldom = too_seldom(met, least=asked.least)
    record = {
        "command": f"python -m tests.measured.random_scenarios --each {asked.each} "
                   f"--seed {asked.seed}",
        "date": time.strftime("%Y-%m-%d"), "zsim": __version__, "laws": list(LAWS),
        "scenarios": met.pop("scenarios"), "seconds": round(time.perf_counter() - begin),
        "processes": asked.jobs, "seconds_of_computing": round(computing),
        "broke a law": len(wrong), "least": asked.least, "too_seldom": seldom,
        "situations": dict(sorted(met.items(), key=lambda item: -item[1])),
    }
    text = json.dumps(record, indent=1) + "\n"
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(bool(seldom or wrong))


if __name__ == "__main__":
    sys.exit(main())
