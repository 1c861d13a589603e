"""Speed: `python -m tests.benchmarks [--json]` measures what is promised, and names the machine.

Benchmarks are not part of the suite: a time is a property of a machine. Each figure is the median
of several runs, of a whole process where it says so. The best of them is shown beside it, since a
shared machine only ever adds. A first run is not counted: after it modules are compiled, as they
are for whoever has used `zsim` once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median

from zsim.analysis.sweep import workers
from zsim.analysis.sweep.point import Point, row_of
from zsim.engine.costs.op_costs import Costs
from zsim.engine.faulty_step import simulate_faulty_step
from zsim.ir.ledger_replay import replay
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario
from zsim.scenario.plan import plan

HERE = Path(__file__).parent
OTHER = HERE.parents[1] / "scenarios" / "scale" / "fsdp2-gpt-8.toml"
COMPILED = str(Path(tempfile.gettempdir()) / "zsim-benchmarks")
"""Folder of the processes' compiled modules, so that no earlier run of anything else matters."""
Measure = Callable[[], float]


def seconds(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def process(*arguments: str) -> Measure:
    """The seconds of a whole process `zsim arguments`."""
    command = [sys.executable, "-m", "zsim", *arguments]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment |= {"PYTHONPYCACHEPREFIX": COMPILED}
    return lambda: seconds(
        lambda: subprocess.run(command, check=True, capture_output=True, env=environment)
    )


def folded_step() -> float:
    """One 32-layer FSDP2 step folded to its distinct ranks, from the loaded scenario to the Run, in
    this process."""
    case = scenario.load(HERE / "fsdp2-32-layers-64-ranks.toml")
    return seconds(lambda: SimBackend().run(case, options=RunOptions()))


def over_drives(strategy: str) -> Measure:
    """Seconds of a step of Llama 2 70B whose states are on drives, from the loaded scenario to the
    Run."""
    case = scenario.load(HERE / "zero3-70b-nvme-64-ranks.toml").with_(strategy={"name": strategy})
    return lambda: seconds(lambda: SimBackend().run(case, options=RunOptions()))


def row_of_a_sweep(key: str, values: Sequence[int]) -> Measure:
    """Seconds of one row of a sweep of 32 layers, from tables to figures, with another of `values`
    each time."""
    tables = scenario.load(HERE / "fsdp2-32-layers-8-ranks.toml").tables
    points = cycle([Point(tables, str(HERE), {key: value}) for value in values])
    return lambda: seconds(lambda: row_of(next(points)))


def row_on_all_cores() -> float:
    """Seconds of a sweep on all cores, for each of its 128 rows; workers have been started."""
    tables = scenario.load(HERE / "fsdp2-32-layers-8-ranks.toml").tables
    points = [
        Point(tables, str(HERE), {"model.num_layers": layers, "batch.micro_batch": size})
        for layers in range(17, 33) for size in range(1, 9)
    ]
    return seconds(lambda: list(workers.results(row_of, points))) / len(points)


def all_folded() -> float:
    """Llama 3 405B, 126 layers, on 16,384 ranks, folded, from the loaded scenario to the Run."""
    case = scenario.load(HERE / "fsdp2-405b-1024-ranks.toml").with_(
        cluster={"nodes": 2048}, strategy={"dp_shard": 16384}
    )
    return seconds(lambda: SimBackend().run(case, options=RunOptions()))


def all_distinct() -> float:
    """The same ranks, each kernel of each with its own jitter: from the Program to the times of all
    ranks."""
    case = scenario.load(HERE / "fsdp2-405b-1024-ranks.toml").with_(
        cluster={"nodes": 2048}, strategy={"dp_shard": 16384},
        faults=[{"kind": "jitter", "mean": "20 us", "each": "op"}],
    )
    program, costs = plan(case, device="cuda"), Costs(case.cluster, case.executed)
    return seconds(lambda: simulate_faulty_step(program, case.faults, costs=costs))


def rings_as_steps() -> float:
    """A 32-layer FSDP2 step on 64 ranks, hop by hop, likewise."""
    case = scenario.load(HERE / "fsdp2-32-layers-64-ranks.toml")
    stepwise = case.with_(execution={"detail": "steps"})
    return seconds(lambda: SimBackend().run(stepwise, options=RunOptions()))


def memory_timeline(name: str) -> Measure:
    """Seconds from a loaded scenario to the memory timeline of one rank's phases.

    The interpreter has planned something else before.
    """

    def measure() -> float:
        case, other = scenario.load(HERE / name), scenario.load(OTHER)
        plan(other, device="cuda")
        return seconds(lambda: replay(plan(case, device="cuda").ranks[0]))

    return measure


def warm_launch() -> float:
    """Two ranks from a fork server that is warm, until both have answered; without a process group.
    """
    from zreal.processes.launch import launch

    def start() -> object:
        return launch("tests.zreal.processes.rank_bodies:fine", {"given": 0}, world_size=2)

    start()
    return seconds(start)


def all_ranks(name: str) -> Measure:
    """The seconds of a whole process that simulates every rank of a scenario, saves the Run and
    prints its JSON."""
    folder = Path(tempfile.mkdtemp())
    return process(
        "run", str(HERE / name), "--all-ranks", "--json", "--save", str(folder / "run.json")
    )


BENCHMARKS: dict[str, tuple[float, int, Measure]] = {
    "zsim --help, whole process": (0.2, 7, process("--help")),
    "64 ranks x 32 layers, --all-ranks --save, whole process": (
        1.5, 5, all_ranks("fsdp2-32-layers-64-ranks.toml")
    ),
    "1,024 ranks x 80 layers, --all-ranks --save, whole process": (
        8.0, 3, all_ranks("fsdp2-80-layers-1024-ranks.toml")
    ),
    "64 ranks x 32 layers, HSDP, links shared, whole process": (
        3.0, 5, all_ranks("hsdp-32-layers-64-ranks.toml")
    ),
    "1,024 ranks x 80 layers, HSDP, links shared, whole process": (
        16.0, 3, all_ranks("hsdp-80-layers-1024-ranks.toml")
    ),
    "memory timeline, 32 layers, 8 ranks, in process": (
        0.010, 15, memory_timeline("fsdp2-32-layers-8-ranks.toml")
    ),
    "memory timeline, Llama 3 405B, 1,024 ranks, in process": (
        0.100, 7, memory_timeline("fsdp2-405b-1024-ranks.toml")
    ),
    "one 32-layer step folded, in process": (0.030, 15, folded_step),
    "Llama 2 70B, states on drives, 64 ranks, in process": (0.5, 7, over_drives("zero3")),
    "the same under deepspeed3, in process": (0.5, 7, over_drives("deepspeed3")),
    "16,384 ranks x 126 layers folded, in process": (0.1, 5, all_folded),
    "16,384 ranks x 126 layers, all distinct, in process": (60.0, 1, all_distinct),
    "row of a sweep, 25 to 32 layers in turn, in process": (
        0.003, 16, row_of_a_sweep("model.num_layers", range(25, 33))
    ),
    "row of a sweep, micro-batches of 1 to 8 in turn, in process": (
        0.003, 16, row_of_a_sweep("batch.micro_batch", range(1, 9))
    ),
    "row of a sweep, 32 layers, 64 micro-batches, in process": (
        0.3, 7, row_of_a_sweep("batch.accumulation", (64,))
    ),
    "row of a sweep on all cores": (0.002, 3, row_on_all_cores),
    "64 ranks x 32 layers, rings as steps, in process": (30.0, 3, rings_as_steps),
    "2-rank launch from a warm fork server, no process group": (0.3, 7, warm_launch),
}
"""Target in seconds, number of runs and measurement, by name."""


def main() -> None:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    software = f"Python {platform.python_version()}, torch {version('torch')}"
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, {software}, load {os.getloadavg()[0]:.2f}"
    )
    rows = []
    for name, (target, times, measure) in BENCHMARKS.items():
        measure()
        taken = sorted(measure() for _ in range(times))
        rows.append({
            "name": name, "target_s": target, "median_s": median(taken), "best_s": taken[0],
            "runs": times,
        })
        if not as_json:
            sys.stdout.write(f"{name:<58} target {target:6.3f} s   median {median(taken):6.3f}   "
                             f"best {taken[0]:6.3f}   of {times}\n")
            sys.stdout.flush()
    if as_json:
        sys.stdout.write(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    else:
        sys.stdout.write(f"on {machine}\n")


if __name__ == "__main__":
    main()
