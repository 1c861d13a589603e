"""Faults of single ranks in real gloo runs: `python -m tests.measured.faults`.

The matrix has every kind of fault, with 2 and 4 ranks, on the first rank and the last. Random runs
follow: another scenario, rank and collective each. A row says who was blamed, and how many
seconds after the fault. It counts processes that were left, and tells what was kept of the Run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.faults import CHANGES, ENDS, Fault
from tests.support.folders import PARITY
from zreal.processes import launch
from zsim.calibration.machine import machine_file
from zsim.ir.run import IncompleteRunError
from zsim.runs import registry
from zsim.runs.backend import RunOptions
from zsim.scenario.scenario import Scenario, load

KINDS = (*ENDS, *CHANGES, "other op")
LIMIT_S = 8.0
"""Seconds after which a run counts as hung: start, first step and some more."""
SCENARIOS = {2: ("fsdp2-mlp-2", "ddp-mlp-2", "zero3-mlp-2-lookahead-0", "zero2-mlp-2"),
             4: ("fsdp2-mlp-4", "zero3-mlp-4", "ddp-gpt-4", "fsdp1-gpt-4")}
MOST_COLLECTIVES = {"ddp-mlp-2": 4, "ddp-gpt-4": 4}
"""Collectives up to which a fault may come, where a run has few."""
SEED = 20261124


def fail(scenario: Scenario, fault: Fault, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The row of one run of `scenario` with `fault`."""
    start = launch.launch

    def faulty(target: str, arguments: dict[str, Any], **more: Any) -> list[Any]:
        assert target == "zreal.rank_run:launched_rank"
        job = {**arguments, "fault": fault.table()}
        return start("tests.support.faults:faulty_rank", job, **more)

    setattr(launch, "launch", faulty)  # noqa: B010  mypy
    began, error = time.time(), None
    try:
        options = RunOptions(timeout_s=limit_s, numerics="none")
        registry.find("gloo").run(scenario, options=options)
    except IncompleteRunError as caught:
        error = caught
    finally:
        setattr(launch, "launch", start)  # noqa: B010  mypy
    ended = time.time()
    stamp = Path(fault.stamp)
    failed = float(stamp.read_text()) if stamp.is_file() and stamp.read_text() else None
    row: dict[str, Any] = {
        "scenario": scenario.name, "kind": fault.kind, "ranks": scenario.world_size,
        "rank": fault.rank, "at": fault.at, "blamed": error.where if error else "",
        "right": bool(error) and error.where == f"rank {fault.rank}",
        "verdict_s": None if failed is None else round(ended - failed, 2),
        "at_the_limit": ended - began >= limit_s, "wall_s": round(ended - began, 2),
        "left": len(left_over()),
    }
    if error is not None:
        row["found"] = error.found
        row["kept"] = [sorted(rank.phases) for rank in error.run.ranks]
        row["marked"] = not error.run.complete
    return row


def left_over() -> list[int]:
    """Processes that the fork server has started and that still run."""
    servers = [process for process in _children(os.getpid()) if _is_server(process)]
    return [child for server in servers for child in _children(server) if _state(child) != "Z"]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _is_server(pid: int) -> bool:
    return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def matrix() -> list[tuple[str, Fault]]:
    """Scenario and fault of each cell."""
    return [
        (SCENARIOS[ranks][0], Fault(kind=kind, rank=rank))
        for kind in KINDS for ranks in (2, 4) for rank in (0, ranks - 1)
    ]


def draws(number: int) -> list[tuple[str, Fault]]:
    """So many random faults, the same for the same seed."""
    dice = random.Random(SEED)
    cases = []
    for _ in range(number):
        ranks = dice.choice((2, 4))
        name, kind = dice.choice(SCENARIOS[ranks]), dice.choice(KINDS)
        at = dice.randrange(MOST_COLLECTIVES.get(name, 12))
        cases.append((name, Fault(kind=kind, rank=dice.randrange(ranks), at=at)))
    return cases


def measure(number: int) -> dict[str, Any]:
    """The record: provenance, the matrix, random runs."""
    rows: dict[str, list[dict[str, Any]]] = {"matrix": [], "random": []}
    with tempfile.TemporaryDirectory() as folder:
        for part, cases in (("matrix", matrix()), ("random", draws(number))):
            for index, (name, fault) in enumerate(cases):
                stamp = str(Path(folder) / f"{part}{index}")
                row = fail(load(PARITY / f"{name}.toml"), Fault(**fault.table() | {"stamp": stamp}))
                rows[part].append(row)
                sys.stderr.write(
                    f"{part} {index} {row['scenario']} {row['kind']} rank {row['rank']} at "
                    f"{row['at']}: {row['blamed'] or 'no failure'} {row['verdict_s']} s "
                    f"{'' if row['right'] else row.get('found', '')}\n"
                )
    return {
        "command": f"python -m tests.measured.faults --random {number}",
        "date": time.strftime("%Y-%m-%d"), "processor": machine_file.processor(),
        "system": f"{platform.system()} {platform.release()}", "torch": torch.__version__,
        "python": platform.python_version(), "seed": SEED, "limit_s": LIMIT_S, **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=200, help="random runs after the matrix")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    record = measure(options.random)
    for part in ("matrix", "random"):
        rows = record[part]
        told = [row["verdict_s"] for row in rows if row["verdict_s"] and not row["at_the_limit"]]
        sys.stdout.write(
            f"{part}: {len(rows)} runs, {sum(row['right'] for row in rows)} blamed the rank at "
            f"fault alone, {sum(row['left'] for row in rows)} processes left, slowest verdict "
            f"{max(told, default=0)} s\n"
        )
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
