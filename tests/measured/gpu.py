"""Everything that one GPU can confirm: `python -m tests.measured.gpu --out gpu.json`.

Peaks of rank 0 come first: allocated and reserved bytes and the step's time, measured and
predicted. The fake process group has real memory and real compute at any world size. Real ranks
that share the GPU follow, as hosts of their own for NCCL. It needs torch and no network. Without a
GPU it runs smaller models on the CPU, so that every line of it is tried.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import zsim
from tests.support.folders import PARITY, ROOT
from zreal import torch_private
from zreal.meters.cache import cache_record
from zreal.observer.observer import observe
from zsim.memory import fits
from zsim.scenario.plan import planned

LIMIT_S = 460.0
"""Seconds for all of it; what is left then is recorded as not measured."""
STEPS = 3
"""Steps without a meter, whose peaks and median time are those of a row."""
GPU_MODELS = ("llama-3.2-1b", "llama-2-7b")
CPU_MODELS = ("gpt-tiny", "llama-tiny")
WORLDS = (8, 64, 1024)
PARITY_SCENARIOS = ("fsdp2-mlp-2", "ddp-mlp-2", "zero3-mlp-4")
SHARE = 0.9
"""Most of the GPU's memory that a scenario may need by its prediction."""


def scenarios(device: str) -> Iterator[zsim.Scenario]:
    """fsdp2 and ddp of each model at each world size."""
    for model in GPU_MODELS if device == "cuda" else CPU_MODELS:
        for world_size in WORLDS:
            for strategy in ("fsdp2", "ddp"):
                cluster = (
                    {"preset": "dgx-h100", "nodes": world_size // 8} if device == "cuda"
                    else {"preset": "cpu-gloo", "ranks": world_size}
                )
                yield zsim.Scenario(
                    model={"preset": model}, cluster=cluster, strategy={"name": strategy},
                    batch={"micro_batch": 1, "sequence_length": 1024 if device == "cuda" else 64},
                    precision={"parameters": "bf16"} if device == "cuda" else None,
                    activation_checkpointing={"mode": "full"} if device == "cuda" else None,
                    name=f"{model}-{strategy}-{world_size}",
                )


def peaks(scenario: zsim.Scenario, device: str) -> dict[str, Any]:
    """The row of `scenario`: what rank 0 has and takes, and what was predicted of it."""
    run = zsim.simulate(scenario)
    figures = run.figures
    memory = run.ranks[0].phases["steady"].memory
    row: dict[str, Any] = {
        "scenario": scenario.to_dict(), "predicted_peak_bytes": figures.peak_memory_bytes,
        "predicted_growth_bytes": memory.peak_bytes - memory.start_bytes,
        "predicted_compute_ns": figures.compute_ns,
    }
    if device == "cuda":
        needs = fits.assess(planned(scenario))
        row["predicted_reserved_bytes"] = needs.reserved_bytes
        present = torch.cuda.get_device_properties(0).total_memory
        if needs.needed.nbytes > SHARE * present:
            return row | {"not_measured": f"needs {needs.needed.nbytes} B of {present}"}
    with torch_private.fake_group(rank=0, world_size=scenario.world_size):
        trained = observe(scenario, rank=0, device=device)
        row["metered_peak_bytes"] = trained.run.phases["steady"].memory.peak_bytes
        cache = cache_record(trained.plain_step, device=device)
        times = [timed(trained.plain_step, device) for _ in range(STEPS)]
        row["step_ns"] = round(statistics.median(times))
        if cache is not None:
            row |= asdict(cache)
    del trained
    gc.collect()
    return row


def timed(step: Any, device: str) -> int:
    """Nanoseconds of one step, to the end of what it has put on the device."""
    begin = time.perf_counter_ns()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter_ns() - begin


def real_ranks(device: str, left_s: float) -> dict[str, Any]:
    """The comparisons of real ranks that share the device, as `zsim validate` prints them."""
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        launch = f"{sys.executable} {ROOT / 'tests/support/slurm.py'} {{ranks}} {{worker}}"
        command = [
            sys.executable, "-m", "zsim", "validate",
            *(str(PARITY / f"{name}.toml") for name in PARITY_SCENARIOS),
            "--against", backend, "--launch", launch, "--save", folder, "--json", "--timeout", "60",
        ]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1.0, left_s), cwd=ROOT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"not_measured": "no time was left"}
    try:
        return {"exit_code": ended.returncode, "result": json.loads(ended.stdout)}
    except ValueError:
        return {"exit_code": ended.returncode, "stderr": ended.stderr[-2000:]}


def measure(device: str) -> dict[str, Any]:
    """The record: provenance, a row for each scenario, real ranks."""
    began = time.monotonic()
    rows: dict[str, Any] = {}
    reserve = 120.0 if device == "cuda" else 60.0
    for scenario in scenarios(device):
        if time.monotonic() - began > LIMIT_S - reserve:
            rows[scenario.name] = {"not_measured": "no time was left"}
            continue
        try:
            rows[scenario.name] = peaks(scenario, device)
        except (RuntimeError, zsim.ZsimError) as error:  # one row must not take the others along
            rows[scenario.name] = {"not_measured": f"{type(error).__name__}: {str(error)[:300]}"}
            gc.collect()
        sys.stderr.write(f"{scenario.name}: {line_of(rows[scenario.name])}\n")
    ranks = real_ranks(device, LIMIT_S - (time.monotonic() - began))
    return {
        "command": "python -m tests.measured.gpu", "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "driver": driver() if device == "cuda" else None, "torch": torch.__version__,
        "cuda": torch.version.cuda, "nccl": nccl() if device == "cuda" else None,
        "python": platform.python_version(), "seconds": round(time.monotonic() - began, 1),
        "rows": rows, "real_ranks": ranks,
    }


def line_of(row: dict[str, Any]) -> str:
    """The row in a line: peaks, measured over predicted."""
    if "not_measured" in row:
        return str(row["not_measured"])
    text = f"metered {row['metered_peak_bytes']:,} B, predicted {row['predicted_peak_bytes']:,} B"
    if "allocated_bytes" in row:
        share = row["reserved_bytes"] / row["predicted_reserved_bytes"] - 1
        grown = row["peak_bytes"] - row["start_bytes"] - row["predicted_growth_bytes"]
        text += f", asked for {grown:+,} B, allocated {row['allocated_bytes']:,} B"
        text += f", reserved {share:+.1%}"
    return f"{text}, step {row['step_ns'] / 1e6:.1f} ms"


def driver() -> str:
    """The driver's version by nvidia-smi; "" without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def nccl() -> str:
    """NCCL's version, as torch was built with it."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    record = measure("cuda" if torch.cuda.is_available() else "cpu")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    codes = record["real_ranks"].get("exit_code")
    sys.stdout.write(f"{len(record['rows'])} rows in {record['seconds']} s; real ranks: {codes}\n")


if __name__ == "__main__":
    main()
