"""Faults in real gloo runs: `python -m tests.measured.faults`.

The matrix has every kind of fault, with 2 and 4 ranks, on the first rank and the last. Random runs
have another scenario, rank and collective each. Both are of ranks from the fork server; `launched`
is the matrix under torchrun, `around` are faults of the port, the disk and the controller. A row
says who was blamed, and how many seconds after the fault. It counts processes that were left, and
tells what was kept of the Run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.measured.launched_faults import (
    CONTROLLERS,
    LAUNCHERS,
    controller_ended,
    fail_launched,
    full_disk_of_the_controller,
    port_taken,
)
from tests.support.faulty.faults import CHANGES, ENDS, FULL_DISK, Fault
from tests.support.folders import PARITY
from zreal.processes import launch
from zreal.processes.fork_server import server_pid
from zreal.processes.reports.failure_report import LaunchError
from zsim.calibration.machine import machine_file
from zsim.io.system.processes import children
from zsim.ir.run import IncompleteRunError, RunRecord
from zsim.runs import registry
from zsim.runs.backend import RunOptions
from zsim.runs.compare.compare import compare
from zsim.scenario.scenario import Scenario, load

KINDS = (*ENDS, *CHANGES, "other op")
PARTS = ("matrix", "random", "launched", "around")
LIMIT_S = 8.0
"""Seconds after which a run counts as hung: start, first step and some more."""
LAUNCHED_LIMIT_S = 25.0
"""The same for ranks of torchrun, each of which loads torch by itself."""
SCENARIOS = {2: ("fsdp2-mlp-2", "ddp-mlp-2", "zero3-mlp-2-lookahead-0", "zero2-mlp-2"),
             4: ("fsdp2-mlp-4", "zero3-mlp-4", "ddp-gpt-4", "fsdp1-gpt-4")}
MOST_COLLECTIVES = {"ddp-mlp-2": 4, "ddp-gpt-4": 4}
"""Collectives up to which a fault may come, where a run has few."""
SEED = 20261124


def fail(scenario: Scenario, fault: Fault, *, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The row of one run of `scenario` with `fault`."""
    start = launch.launch

    def faulty(target: str, arguments: dict[str, Any], **more: Any) -> list[Any]:
        assert target == "zreal.rank.run:launched_rank"
        job = {**arguments, "fault": fault.table()}
        return start("tests.support.faulty.faults:faulty_rank", job, **more)

    setattr(launch, "launch", faulty)  # noqa: B010  mypy
    began, error, blamed = time.time(), None, ""
    try:
        options = RunOptions(timeout_s=limit_s, numerics="none")
        run = registry.find("gloo").run(scenario, options=options)
    except IncompleteRunError as caught:
        error, blamed = caught, caught.where
    finally:
        setattr(launch, "launch", start)  # noqa: B010  mypy
    ended = told = time.time()
    stamp = Path(fault.stamp)
    failed = float(stamp.read_text()) if stamp.is_file() and stamp.read_text() else None
    if error is None:
        blamed, failed = told_by_comparison(scenario, run), ended
        told = time.time()
    row: dict[str, Any] = {
        "scenario": scenario.name, "kind": fault.kind, "ranks": scenario.world_size,
        "rank": fault.rank, "at": fault.at, "blamed": blamed,
        "right": blamed == f"rank {fault.rank}", "by": "failure" if error else "comparison",
        "verdict_s": None if failed is None else round(told - failed, 2),
        "at_the_limit": ended - began >= limit_s, "wall_s": round(ended - began, 2),
        "left": len(left_over()),
    }
    if error is not None:
        row["found"] = error.found
        row["kept"] = [sorted(rank.phases) for rank in error.run.ranks]
        row["marked"] = not error.run.complete
    return row


def told_by_comparison(scenario: Scenario, run: RunRecord) -> str:
    """The rank whose bytes are not those of the simulator, as text; "" where none differs."""
    predicted = registry.find("sim").run(scenario, options=RunOptions())
    bytes_of = next(check for check in compare(predicted, run) if check.name == "bytes")
    return bytes_of.detail.partition(",")[0] if bytes_of.status == "failed" else ""


def left_over() -> list[int]:
    """Processes that the fork server has started and that still run."""
    server = server_pid()
    return [child for child in children(server) if _state(child) != "Z"] if server else []


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


GRABBER = """
import socket, sys, time
while True:
    held = [socket.socket() for _ in range(900)]
    for number, each in enumerate(held):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, number % 2)
        each.bind(("127.0.0.1" if number % 4 else "", 0))
        each.listen()
    open(sys.argv[1], "w").close()
    time.sleep(0.05)
    for each in held:
        each.close()
"""
"""A process that listens at many of the ports that the system hands out, always at others."""
LAUNCHES = 50


def ports_grabbed(ranks: int, *, folder: Path, launches: int = LAUNCHES) -> dict[str, Any]:
    """The row of many launches by the fork server beside a process that takes ports.

    None can fail, as the system chooses each port when it binds it.
    """
    folder.mkdir(parents=True)
    took = folder / "took"
    grabber = subprocess.Popen([sys.executable, "-c", GRABBER, str(took)])
    while not took.exists():
        time.sleep(0.05)
    errors, began = [], time.time()
    try:
        for _ in range(launches):
            try:
                sums = launch.launch(
                    "tests.support.faulty.faults:connected_rank", {}, world_size=ranks
                )
                assert sums == [sum(range(ranks))] * ranks
            except LaunchError as error:
                errors.append(str(error))
    finally:
        grabber.kill()
        grabber.wait()
    return {
        "launcher": "forkserver", "scenario": "", "kind": "port taken", "ranks": ranks,
        "rank": None, "launches": launches,
        "blamed": "; ".join(errors), "right": not errors, "verdict_s": None,
        "at_the_limit": False, "wall_s": round(time.time() - began, 2), "left": len(left_over()),
    }


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


def rows_of(part: str, number: int, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of one part; `number` of random ones."""
    if part in ("matrix", "random"):
        launch.launch("tests.support.faulty.faults:connected_rank", {}, world_size=1)  # loads torch
        for index, (name, fault) in enumerate(matrix() if part == "matrix" else draws(number)):
            told = replace(fault, stamp=str(folder / f"{part}{index}"))
            yield fail(load(PARITY / f"{name}.toml"), told)
        return
    names = {ranks: SCENARIOS[ranks][0] for ranks in (2, 4)}
    if part == "launched":
        disks = [
            (names[ranks], Fault(kind=FULL_DISK, rank=rank))
            for ranks in names for rank in (0, ranks - 1)
        ]
        for index, (name, fault) in enumerate((*matrix(), *disks)):
            yield fail_launched(
                load(PARITY / f"{name}.toml"), fault, folder=folder / str(index),
                limit_s=LAUNCHED_LIMIT_S,
            )
        return
    for ranks, name in names.items():
        yield ports_grabbed(ranks, folder=folder / f"{name} ports")
        yield port_taken(
            load(PARITY / f"{name}.toml"), folder=folder / name, limit_s=LAUNCHED_LIMIT_S
        )
        yield full_disk_of_the_controller(name, folder=folder / f"{name} full")
        for launcher in LAUNCHERS:
            for kind in CONTROLLERS:
                yield controller_ended(
                    name, kind, launcher, folder=folder / f"{name} {kind} {launcher}"
                )


def measure(part: str, number: int) -> dict[str, Any]:
    """The record of one part: provenance and rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(part, number, Path(folder)):
            rows.append(row)
            sys.stderr.write(
                f"{part} {len(rows)} {row['scenario']} {row['kind']} rank {row['rank']}: "
                f"{row['blamed'] or 'no failure'} {row['verdict_s']} s, {row['left']} left "
                f"{'' if row['right'] else row.get('found', '')}\n"
            )
    return {
        "command": f"python -m tests.measured.faults --part {part}",
        "date": time.strftime("%Y-%m-%d"), "processor": machine_file.processor(),
        "system": f"{platform.system()} {platform.release()}", "torch": torch.__version__,
        "python": platform.python_version(), "seed": SEED,
        "limit_s": LIMIT_S if part in ("matrix", "random") else LAUNCHED_LIMIT_S, "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="(default: all)")
    parser.add_argument("--random", type=int, default=200, help="random runs")
    parser.add_argument("--out", type=Path, help="the JSON file in which parts are replaced")
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
    for part in options.part or PARTS:
        record[part] = measure(part, options.random)
        rows = record[part]["rows"]
        told = [row["verdict_s"] for row in rows if row["verdict_s"] and not row["at_the_limit"]]
        sys.stdout.write(
            f"{part}: {len(rows)} runs, {sum(row['right'] for row in rows)} named "
            f"correctly, {sum(row['left'] for row in rows)} processes left, slowest verdict "
            f"{max(told, default=0)} s\n"
        )
        if options.out:
            text = without_folders(json.dumps(record, indent=1))
            options.out.write_text(f"{text}\n", encoding="utf-8")


def without_folders(text: str) -> str:
    """The text with files by their names alone: what ranks say names folders of the machine.

    >>> without_folders("a wrong shard (/home/me/site-packages/torch/_ops.py, line 875)")
    'a wrong shard (_ops.py, line 875)'
    """
    return re.sub(r"(?<![\w./])/(?:[\w.+-]+/)+(?=[\w.+-])", "", text)


if __name__ == "__main__":
    main()
