"""Steps on shaped networks, predicted and measured: writes tests/measured/testbed.json.

`python -m tests.support.testbed_grid [LAYOUT…]` takes about half an hour; with layouts it measures
those alone and keeps the other rows. Compute is emulated; collectives are calibrated on each layout
with messages of other sizes than the steps', and the host by `zsim calibrate --here --quick`.
Where other work uses the machine, `chrt -r 1` gives ranks a core at once; they need little of it.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from zreal.backends import GlooBackend
from zsim.calibration.machine import here, machine_file, shaped
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.testbed import Layout, layout
from zsim.engine.costs.op_costs import Costs
from zsim.io import files
from zsim.ir.run import RunRecord
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.parts import cluster_file
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

TARGET = Path(__file__).parents[1] / "measured" / "testbed.json"
LAYOUTS = (
    "2x1gbit", "4x500mbit", "2x2x1gbit/200mbit", "4x500mbit,3=200mbit", "2x200mbit", "4x200mbit",
    "4x1gbit,3=200mbit", "2x500mbit", "4x1gbit", "2x2x1gbit/500mbit",
)
RATIOS = (0.3, 1.0, 3.0)
"""Compute over communication."""
TIMED = ("ddp", "fsdp2")
TWO_LEVELS = (*TIMED, "hsdp")
"""Strategies of two-level layouts, where replicas are in different nodes."""
AHEAD = ("2x1gbit", "2x2x1gbit/500mbit", "4x500mbit,3=200mbit", "4x1gbit")
"""Layouts on which zero3 is timed with a lookahead of 0 and of 1."""
DISTURBED, MOST_RUNS = 0.05, 3
"""Spread of steps from which a run counts as disturbed and is repeated, and the most runs of a
row. All their steps count."""
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")
CORES = 2
COUNTED = ("2x1gbit", "4x1gbit")
MODEL = {"dims": [360] * 4, "hidden": 920, "num_classes": 16}


def main(chosen: tuple[str, ...]) -> None:
    """Measure all layouts, or those `chosen`; write after each, so that an interruption keeps what
    there is."""
    table: dict[str, Any] = (
        json.loads(TARGET.read_text()) if chosen else {"steps": [], "wire_bytes": []}
    )
    table = {"how": _provenance(), **{name: table[name] for name in ("steps", "wire_bytes")}}
    bases = {hosts: _base(hosts) for hosts in (2, 4)}
    for text in () if chosen else COUNTED:
        shape = layout(text)
        for name in STRATEGIES:
            if name != "hsdp" or shape.hosts == 4:
                table["wire_bytes"].append(_counted(shape, name, bases[shape.hosts]))
                sys.stderr.write(f"{table['wire_bytes'][-1]}\n")
        _write(table)
    for text in chosen or LAYOUTS:
        shape = layout(text)
        cluster = shaped.calibrated(GlooBackend(), shape, base=bases[shape.hosts])
        rows = []
        for row in _steps(shape, cluster):
            rows.append(row)
            sys.stderr.write(f"{row}\n")
        others = [row for row in table["steps"] if row["layout"] != text]
        table["steps"] = sorted((*others, *rows), key=lambda row: LAYOUTS.index(row["layout"]))
        _write(table)


def _write(table: dict[str, Any]) -> None:
    errors = [abs(row["error"]) for row in table["steps"]]
    bytes_off = [abs(row["error"]) for row in table["wire_bytes"]]
    table["figures"] = {
        "steps": len(errors), "median": round(median(errors), 4) if errors else None,
        "worst": max(errors, default=None), "wire_bytes_worst": max(bytes_off, default=None),
    }
    TARGET.write_text(json.dumps(table, indent=1) + "\n")


def _provenance() -> dict[str, str]:
    return {
        "command": "python -m tests.support.testbed_grid", "date": time.strftime("%Y-%m-%d"),
        "cpu": machine_file.processor(), "kernel": platform.release(),
        "torch": machine_file.torch_version(), "python": platform.python_version(),
        "model": f"mlp {json.dumps(MODEL)}, micro-batch 4, SGD", "compute": "emulated",
        "calibrated": f"messages of {list(shaped.SIZES)} B; the host by zsim calibrate --here "
                      f"--quick",
    }


def _base(hosts: int) -> ClusterSpec:
    """This machine's own constants with a rank at work on each core, from the user's cache or else
    the quick calibration. Ranks leave a collective together, so that more of them share cores."""
    path = machine_file.cached(CORES)
    if not path.is_file():
        made = here.calibrated(GlooBackend(), world_size=CORES, quick=True)
        files.write(path, made.text)
    base = cluster_file.load(str(path), folder=None, nodes=1, ranks=hosts).with_idle_cores
    sharing, calls = max(1, hosts // CORES), base.overheads
    return replace(
        base, device=replace(base.device, memory_bandwidth=base.device.memory_bandwidth // sharing),
        overheads=replace(calls, **{
            name: sharing * getattr(calls, name)
            for name in ("issue_kernel", "issue_collective", "issue_hook", "step_dtensor")
        }),
    )


def _scenario(name: str, hosts: int, lookahead: int | None = None) -> Scenario:
    options = {"dp_replicate": 2, "dp_shard": 2} if name == "hsdp" else {}
    if lookahead is not None:
        options = {"lookahead": lookahead}
    return Scenario(
        model={"family": "mlp", "sizes": MODEL}, batch={"micro_batch": 4},
        strategy={"name": name, **options}, cluster={"preset": "cpu-gloo", "ranks": hosts},
        optimizer={"name": "sgd"},
    )


def _steps(shape: Layout, cluster: ClusterSpec) -> Iterator[dict[str, Any]]:
    names: list[tuple[str, int | None]] = [
        (name, None) for name in (TIMED if shape.uplink is None else TWO_LEVELS)
    ]
    for name, lookahead in names + ([("zero3", 0), ("zero3", 1)] if shape.text in AHEAD else []):
        scenario = _scenario(name, shape.hosts, lookahead)
        for ratio in RATIOS:
            own = _with_ratio(scenario, cluster, ratio)
            predicted = _predicted(scenario, own)
            steps: list[int] = []
            for _ in range(MOST_RUNS):
                steps += (run := _of_all_ranks(_measured(scenario, shape, own)))
                if _spread(run) < DISTURBED:
                    break
            middle = round(median(steps))
            yield {
                "layout": shape.text, "strategy": name, "ratio": ratio,
                **({} if lookahead is None else {"lookahead": lookahead}),
                "predicted_ns": predicted.step_time_ns, "measured_ns": middle,
                "steps": len(steps), "spread": round(_spread(steps), 4),
                "error": round((predicted.step_time_ns or 0) / middle - 1, 4),
            }


def _of_all_ranks(run: RunRecord) -> list[int]:
    """Each step of a run, on the rank where it lasted longest."""
    return [max(turn) for turn in zip(*(rank.step_times_ns for rank in run.ranks), strict=True)]


def _spread(times: list[int]) -> float:
    """Distance of the quarters of `times`, over their middle."""
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / middle


def _predicted(scenario: Scenario, cluster: ClusterSpec) -> RunRecord:
    predictor = SimBackend(device="cpu", cluster=cluster)
    return predictor.run(scenario, options=RunOptions(all_ranks=True))


def _measured(scenario: Scenario, shape: Layout, cluster: ClusterSpec) -> RunRecord:
    return GlooBackend().run(
        scenario, options=RunOptions(
            testbed=shape, emulated_on=cluster, timeout_s=300, numerics="none"
        )
    )


def _with_ratio(scenario: Scenario, cluster: ClusterSpec, ratio: float) -> ClusterSpec:
    """`cluster` with products so slow that forward and backward take `ratio` times as long as all
    collectives alone."""
    costs = Costs(cluster=cluster, execution=scenario.executed_on(cluster))
    program = plan(scenario, device="cpu")
    ops = program.of_rank(0).steady
    wire = sum(
        costs.collective_ns(op.kind, op.nbytes, program.mesh.group(op.group, 0))
        for op in ops if op.group
    )
    flops = sum(
        kernel.flops for op in ops if op.kind in ("forward", "backward")
        for kernel in op.kernels if kernel.shape
    )
    share = flops * 10**9 / (ratio * wire) / cluster.device.float32
    return replace(cluster, device=replace(cluster.device, matmul_efficiency=share))


def _counted(shape: Layout, name: str, base: ClusterSpec) -> dict[str, Any]:
    scenario = _scenario(name, shape.hosts)
    predicted, measured = _predicted(scenario, base), _measured(scenario, shape, base)
    sent = [rank.bytes_sent for rank in measured.ranks]
    expected = [rank.bytes_sent for rank in predicted.ranks]
    errors = [left / right - 1 for left, right in zip(expected, sent, strict=True)]
    return {
        "layout": shape.text, "strategy": name, "predicted": expected, "measured": sent,
        "error": round(max(errors, key=abs), 5),
    }


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
