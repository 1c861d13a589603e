"""Own modules under every strategy on the fake process group, each in a precision of four and of
two bytes: `python -m tests.measured.module_sweep --out FILE`.

Each is traced, simulated, trained for real and compared: collectives, their order and bytes, and
the memory of each part of a step. The exit status is 1 where some comparison differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import zsim
from zsim.errors import ZsimError

MODULES = (
    "perceptron", "transformer", "convolutions", "scaled", "towers", "mixed", "loaded", "residual",
    "sums", "sums_of_two", "joined", "keeping",
)
"""Functions of tests/zreal/own/own_modules.py."""
STRATEGIES = ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16")


def verdict(module: str, strategy: str, precision: str) -> str:
    """"exact", or a refusal, or the checks that differ."""
    case = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "accumulation": 2},
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": strategy},
        precision={"parameters": precision},
    )
    try:
        comparison = zsim.validate(
            case, against="fake", module=f"tests.zreal.own.own_modules:{module}"
        )
    except ZsimError as error:
        return f"refused: {error}"
    failed = [check for check in comparison.checks if check.status == "failed"]
    return "; ".join(f"{check.name} {check.detail}" for check in failed) or "exact"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--modules", nargs="*", choices=MODULES, default=MODULES)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for row in itertools.product(asked.modules, STRATEGIES, PRECISIONS):
        rows.append((*row, verdict(*row)))
        print(*rows[-1], flush=True)  # noqa: T201
    counts = Counter(row[-1].partition(":")[0] for row in rows)
    print(dict(counts))  # noqa: T201
    if asked.out:
        lines = ",\n".join(json.dumps(row) for row in rows)
        provenance = json.dumps({"torch": version("torch"), "counts": counts})
        asked.out.write_text(f'{{"provenance": {provenance},\n"rows": [\n{lines}\n]}}\n')
    return int(bool(set(counts) - {"exact", "refused"}))


if __name__ == "__main__":
    sys.exit(main())
