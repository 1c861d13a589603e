"""Predicted against measured step times on this machine: `python -m tests.measured.step_times`.

It measures the machine as `zsim calibrate --here` does. Then it validates scenarios that
calibration has not seen, on gloo ranks with real compute, and records both times of each. It does
so in several rounds, minutes apart, and the median round counts. Ranks of one scenario differ by a
quarter from one start to the next, however many steps they take.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch

import zsim
from zsim.calibration.machine import here, machine_file
from zsim.runs import registry
from zsim.runs.compare.check import Check

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")
APART = 0.1
"""Share by which two strategies' measured times must differ for their order to count."""


def models() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, model table and batch table: three families in two sizes."""
    for layers, width, batch in ((4, 128, 8), (6, 512, 16)):
        sizes = {"dims": [width] * (layers + 1), "hidden": 4 * width, "num_classes": 10}
        yield f"mlp {layers}x{width}", {"family": "mlp", "sizes": sizes}, {"micro_batch": batch}
    for layers, width, length in ((2, 128, 64), (4, 256, 128)):
        sizes = {"num_layers": layers, "hidden_size": width, "num_heads": 4, "vocabulary": 1024}
        batch_table = {"micro_batch": 4, "sequence_length": length}
        yield f"gpt {layers}x{width}", {"family": "gpt", "sizes": sizes}, batch_table
        grouped = {**sizes, "num_kv_heads": 2, "feed_forward": 3 * width}
        yield f"llama {layers}x{width}", {"family": "llama", "sizes": grouped}, batch_table


def scenarios(ranks: int) -> Iterator[tuple[str, str, zsim.Scenario]]:
    """Model, variant and scenario: every strategy on every model, and options on some."""
    for name, model, batch in models():
        for strategy in STRATEGIES:
            table: dict[str, Any] = {"name": strategy}
            if strategy == "hsdp":
                table |= {"dp_replicate": ranks, "dp_shard": 1} if ranks == 2 else {"dp_shard": 2}
            tables = {
                "model": model, "batch": batch, "strategy": table,
                "cluster": {"preset": "cpu-gloo", "ranks": ranks},
                "optimizer": {"name": "adamw", "implementation": "foreach"},
            }
            yield name, strategy, zsim.Scenario(**tables)
            if name.startswith("gpt 2") and strategy in ("ddp", "zero3", "fsdp2"):
                accumulated = {**batch, "accumulation": 3}
                yield name, f"{strategy}, accumulation", zsim.Scenario(
                    **{**tables, "batch": accumulated}
                )
            if name.startswith("llama 2") and strategy in ("ddp", "fsdp2"):
                yield name, f"{strategy}, checkpointing", zsim.Scenario(
                    **tables, activation_checkpointing={"mode": "full"}
                )


def order_faults(rows: list[dict[str, Any]]) -> list[str]:
    """Pairs of strategies on a model with measured times that differ enough, and predicted in the
    other order. Pairs with rounds in either order are told apart by no measurement."""
    wrong = []
    for left, right in combinations(rows, 2):
        if left["model"] != right["model"]:
            continue
        apart = left["measured_ns"] / right["measured_ns"]
        if max(apart, 1 / apart) <= 1 + APART:
            continue
        if (apart > 1) != (left["predicted_ns"] > right["predicted_ns"]):
            slow, fast = (left, right) if apart > 1 else (right, left)
            overlap = min(slow["rounds_ns"]) <= max(fast["rounds_ns"])
            wrong.append(
                f"{left['model']}: {left['variant']} and {right['variant']}"
                f"{', whose rounds overlap' * overlap}"
            )
    return wrong


def _compared(model: str, variant: str, scenario: zsim.Scenario, cluster: Path) -> Check:
    """The check of the step time of one validation."""
    comparison = zsim.validate(scenario, against="gloo", cluster=cluster)
    check = next(item for item in comparison.checks if item.name == "step time")
    sys.stderr.write(f"{model:14} {variant:22} {check.status:6} {check.detail}\n")
    return check


def _row(model: str, variant: str, turns: Sequence[Check]) -> dict[str, Any]:
    """A scenario's row: the median round, and in how many rounds the time was in the band."""
    rounds = [int(check.measured or 0) for check in turns]
    predicted, measured = int(turns[0].predicted or 0), median_low(rounds)
    return {
        "model": model, "variant": variant, "predicted_ns": predicted, "measured_ns": measured,
        "error": round(predicted / measured - 1, 4), "rounds_ns": rounds,
        "rounds_in_band": sum(check.status == "ok" for check in turns),
    }


def measure(ranks: int, *, quick: bool, rounds: int) -> dict[str, Any]:
    """The record: provenance, constants' own errors, and one row a scenario."""
    calibrated = here.calibrated(registry.find("gloo"), world_size=ranks, quick=quick)
    cases, compared = list(scenarios(ranks)), list[list[Check]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text(calibrated.text, encoding="utf-8")
        for number in range(rounds):
            sys.stderr.write(f"round {number + 1} of {rounds}\n")
            compared.append([_compared(*case, path) for case in cases])
    rows = [
        _row(model, variant, turns)
        for (model, variant, _), turns in zip(cases, zip(*compared, strict=True), strict=True)
    ]
    errors = [abs(row["error"]) for row in rows]
    return {
        "command": f"python -m tests.measured.step_times --ranks {ranks} --rounds {rounds}"
                   f"{' --quick' * quick}",
        "date": time.strftime("%Y-%m-%d"), "processor": machine_file.processor(),
        "system": f"{platform.system()} {platform.release()}", "torch": torch.__version__,
        "python": platform.python_version(), "ranks": ranks,
        "calibration_s": round(calibrated.seconds, 1),
        "half_width": round(calibrated.fitted.width, 4), "median_error": round(median(errors), 4),
        "largest_error": max(errors), "orders_wrong": order_faults(rows), "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the calibration's quick form")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    record = measure(options.ranks, quick=options.quick, rounds=options.rounds)
    summary = {key: value for key, value in record.items() if key != "rows"}
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
