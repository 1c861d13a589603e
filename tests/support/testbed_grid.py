"""Steps on shaped networks, predicted and measured: writes tests/measured/testbed.json.

`python -m tests.support.testbed_grid` takes about twelve minutes on two quiet cores. Compute is
emulated; collectives are calibrated on each layout with messages of other sizes than the steps'.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from zreal.backends import GlooBackend
from zsim.calibration.machine import here, machine_file, shaped
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.testbed import Layout, layout
from zsim.engine.costs import Costs
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
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")
COUNTED = ("2x1gbit", "4x1gbit")
MODEL = {"dims": [360] * 4, "hidden": 920, "num_classes": 16}


def main() -> None:
    """Measure all, and write after each layout, so that an interruption keeps what there is."""
    table: dict[str, Any] = {"how": _provenance(), "steps": [], "wire_bytes": []}
    bases = {hosts: _base(hosts) for hosts in (2, 4)}
    for text in COUNTED:
        shape = layout(text)
        for name in STRATEGIES:
            if name != "hsdp" or shape.hosts == 4:
                table["wire_bytes"].append(_counted(shape, name, bases[shape.hosts]))
                sys.stderr.write(f"{table['wire_bytes'][-1]}\n")
        _write(table)
    for text in LAYOUTS:
        shape = layout(text)
        cluster = shaped.calibrated(GlooBackend(), shape, base=bases[shape.hosts])
        for row in _steps(shape, cluster):
            table["steps"].append(row)
            sys.stderr.write(f"{row}\n")
        _write(table)


def _write(table: dict[str, Any]) -> None:
    errors = [abs(row["error"]) for row in table["steps"]]
    bytes_off = [abs(row["error"]) for row in table["wire_bytes"]]
    table["figures"] = {
        "steps": len(errors), "median": round(median(errors), 4) if errors else None,
        "worst": max(errors, default=None),
        "wire_bytes_worst": max(bytes_off, default=None),
    }
    TARGET.write_text(json.dumps(table, indent=1) + "\n")


def _provenance() -> dict[str, str]:
    return {
        "command": "python -m tests.support.testbed_grid", "date": time.strftime("%Y-%m-%d"),
        "cpu": machine_file.processor(), "kernel": platform.release(),
        "torch": machine_file.torch_version(), "python": platform.python_version(),
        "model": f"mlp {json.dumps(MODEL)}, micro-batch 4, SGD",
        "compute": "emulated",
        "calibrated": f"messages of {list(shaped.SIZES)} B; the host by zsim calibrate --here "
                      f"--quick",
    }


def _base(hosts: int) -> ClusterSpec:
    """This machine's own constants with as many ranks at work, from the quick calibration."""
    made = here.calibrated(GlooBackend(), world_size=hosts, quick=True)
    base = cluster_file.parse(made.text.encode(), where="here.toml", nodes=1, ranks=hosts)
    return base.with_idle_cores


def _scenario(name: str, hosts: int) -> Scenario:
    axes = {"dp_replicate": 2, "dp_shard": 2} if name == "hsdp" else {}
    return Scenario(
        model={"family": "mlp", "sizes": MODEL}, batch={"micro_batch": 4},
        strategy={"name": name, **axes}, cluster={"preset": "cpu-gloo", "ranks": hosts},
        optimizer={"name": "sgd"},
    )


def _steps(shape: Layout, cluster: ClusterSpec) -> Iterator[dict[str, Any]]:
    for name in TIMED:
        scenario = _scenario(name, shape.hosts)
        for ratio in RATIOS:
            predicted, measured = _both(scenario, shape, _with_ratio(scenario, cluster, ratio))
            yield {
                "layout": shape.text, "strategy": name, "ratio": ratio,
                "predicted_ns": predicted.step_time_ns, "measured_ns": measured.step_time_ns,
                "error": round(predicted.step_time_ns / measured.step_time_ns - 1, 4),
            }


def _both(scenario: Scenario, shape: Layout, cluster: ClusterSpec) -> tuple[Any, Any]:
    measured = GlooBackend().run(
        scenario, options=RunOptions(testbed=shape, emulated_on=cluster, timeout_s=300)
    )
    predictor = SimBackend(device="cpu", cluster=cluster)
    return predictor.run(scenario, options=RunOptions(all_ranks=True)), measured


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
    predicted, measured = _both(scenario, shape, base)
    sent = [rank.bytes_sent for rank in measured.ranks]
    expected = [rank.bytes_sent for rank in predicted.ranks]
    errors = [left / right - 1 for left, right in zip(expected, sent, strict=True)]
    return {
        "layout": shape.text, "strategy": name, "predicted": expected, "measured": sent,
        "error": round(max(errors, key=abs), 5),
    }


if __name__ == "__main__":
    main()
