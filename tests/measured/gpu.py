"""Everything that one GPU can confirm: `python -m tests.measured.gpu --out gpu.json`.

1. Operators: `zsim calibrate --here`, each constant over the preset's and its left-out errors.
2. Steps of one rank alone, whole and by unit, predicted from the preset and from that calibration.
3. Memory of rank 0 on the fake process group, whose worlds have any size: bytes asked for,
   allocated and reserved, measured and predicted.
4. Real ranks that share the GPU, as hosts of their own for NCCL.

Parts 1 and 2 have the machine to themselves; 3 and 4 run beside each other, as no time is judged
there. `--parts operators,steps` measures some anew and keeps the others of the file. It needs torch
and no network. Without a GPU it runs smaller models on the CPU, so that every line of it is tried.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import zsim
from tests.support.folders import PARITY, ROOT
from zreal import torch_private
from zreal.meters.cache import cache_record
from zreal.observer.observer import observe
from zsim.analysis.simulated_step import add_caches
from zsim.ir.run import RunRecord
from zsim.memory import fits
from zsim.runs.figures.unit_times import time_by_unit
from zsim.scenario.plan import planned

LIMIT_S = 460.0
"""Seconds for all of it; what is left then is recorded as not measured. `--limit` sets others."""
PRESETS = {"H200": "dgx-h200", "H100": "dgx-h100", "A100": "dgx-a100"}
"""The cluster whose GPU's name has this in it: steps are predicted for it."""
GPU_MODELS = ("llama-3.2-1b", "llama-2-7b")
CPU_MODELS = ("gpt-tiny", "llama-tiny")
WORLDS = (8, 64, 1024)
PARTS = ("operators", "steps", "memory", "ranks")
TIMED = {
    "cuda": (
        ("llama-3.2-1b", 4, 2048), ("gpt-2-124m", 8, 1024), ("llama-3.2-1b", 1, 2048),
    ),
    "cpu": (("gpt-small", 2, 128),),
}
"""Models whose steps are timed, with their micro-batch and sequence length."""
TIMED_STRATEGIES = ("fsdp2", "ddp", "zero3")
PARITY_SCENARIOS = {
    "cuda": (
        "fsdp2-mlp-2", "ddp-mlp-2", "fsdp1-mlp-2", "zero1-mlp-2", "zero2-llama-2-bf16",
        "zero3-mlp-4", "hsdp-mlp-2x2", "fsdp2-llama-2-bf16-reduce-fp32",
    ),
    "cpu": ("fsdp2-mlp-2", "zero3-mlp-4"),
}
SHARE = 0.9
"""Most of the GPU's memory that a scenario may need by its prediction."""
JOBS = 3
"""Scenarios whose memory is measured at a time, where each needs less than `SHARE / JOBS`."""


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
    """The row of `scenario`: the bytes of rank 0, measured and predicted."""
    run = zsim.simulate(scenario)
    memory = run.ranks[0].phases["steady"].memory
    row: dict[str, Any] = {
        "scenario": scenario.to_dict(), "predicted_peak_bytes": run.figures.peak_memory_bytes,
        "predicted_growth_bytes": memory.peak_bytes - memory.start_bytes,
    }
    if device == "cuda":
        needs = fits.assess(planned(scenario))
        (cache, *_) = (
            rank.cache for rank in add_caches(scenario, run.record, scenario.cluster).ranks
        )
        row["predicted_start_bytes"] = cache.start_bytes
        row["predicted_reserved_bytes"] = cache.reserved_bytes
        present = torch.cuda.get_device_properties(0).total_memory
        if needs.needed.nbytes > SHARE * present:
            return row | {"not_measured": f"needs {needs.needed.nbytes} B of {present}"}
    with torch_private.fake_group(rank=0, world_size=scenario.world_size):
        trained = observe(scenario, rank=0, device=device)
        row["metered_peak_bytes"] = trained.run.phases["steady"].memory.peak_bytes
        cache = cache_record(trained.plain_step, device=device)
        if cache is not None:
            row |= asdict(cache)
    del trained
    gc.collect()
    return row


def row_of(name: str, device: str) -> dict[str, Any]:
    """The row of the scenario called `name`, or the reason that there is none."""
    scenario = next(each for each in scenarios(device) if each.name == name)
    try:
        row = peaks(scenario, device)
    except (RuntimeError, AssertionError, zsim.ZsimError) as error:  # of one row alone
        row = {"not_measured": f"{type(error).__name__}: {str(error)[:300]}"}
    if device == "cuda":
        torch.cuda.empty_cache()  # the process waits for its next row
    sys.stderr.write(f"{name}: {line_of(row)}\n")
    return row


def memory_rows(device: str, until: float) -> dict[str, Any]:
    """The rows of all scenarios; small ones run side by side, then each large one alone."""
    present = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**36
    names = {
        each.name: zsim.simulate(each).figures.peak_memory_bytes > SHARE / JOBS * present
        for each in scenarios(device)
    }
    rows: dict[str, Any] = {name: {"not_measured": "no time was left"} for name in names}
    for alone in (False, True):
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1 if alone or device == "cpu" else JOBS, mp_context=context)
        pending: dict[str, Future[dict[str, Any]]] = {
            name: pool.submit(row_of, name, device)
            for name, is_large in names.items() if is_large == alone
        }
        for name, future in pending.items():
            try:
                rows[name] = future.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                continue
        pool.shutdown(wait=False, cancel_futures=True)
    return rows


def operators(device: str, folder: str) -> dict[str, Any]:
    """The report of `zsim calibrate --here`; the cluster's file is in `folder`."""
    choice = ["--backend", "nccl"] if device == "cuda" else ["--quick", "--world-size", "2"]
    return json_of(
        ["calibrate", "--here", *choice, "--out", cluster_file(folder)], left_s=150.0
    ) | {"file": Path(cluster_file(folder)).read_text() if device == "cuda" else ""}


def cluster_file(folder: str) -> str:
    """Path of the calibrated cluster."""
    return f"{folder}/here.toml"


def steps(device: str, folder: str, until: float) -> Iterator[dict[str, Any]]:
    """Steps of one rank alone, two on a CPU, by the preset and by the calibration."""
    for model, micro_batch, length in TIMED[device]:
        for strategy in TIMED_STRATEGIES:
            scenario = zsim.Scenario(
                model={"preset": model}, strategy={"name": strategy},
                batch={"micro_batch": micro_batch, "sequence_length": length},
                cluster={"preset": preset_here(), "ranks": 1} if device == "cuda"
                else {"preset": "cpu-gloo", "ranks": 2},
                precision={"parameters": "bf16"} if device == "cuda" else None,
                name=f"{model}-{strategy}-{micro_batch}x{length}",
            )
            if time.monotonic() > until:
                yield {"name": scenario.name, "not_measured": "no time was left"}
                continue
            try:
                yield step_of(scenario, device, folder)
            except zsim.ZsimError as error:
                yield {"name": scenario.name, "not_measured": str(error)[:300]}


def preset_here() -> str:
    """The preset of the GPU that is there; StopIteration where there is none."""
    name = torch.cuda.get_device_name()
    return next(preset for gpu, preset in PRESETS.items() if gpu in name)


def step_of(scenario: zsim.Scenario, device: str, folder: str) -> dict[str, Any]:
    """The checks of one step, by the preset's constants and by the calibrated ones; and the
    nanoseconds of each unit."""
    backend = "nccl" if device == "cuda" else "gloo"
    own = zsim.validate(
        scenario, against=backend, numerics="none", cluster=cluster_file(folder), timeout_s=100.0
    )
    row: dict[str, Any] = {"name": scenario.name, "scenario": scenario.to_dict()}
    by = {"calibrated": own.predicted}
    if device == "cuda":
        by["preset"] = zsim.simulate(scenario).record
    for source, predicted in by.items():
        checks = zsim.compare(predicted, own.measured).checks
        row[source] = {
            "band": predicted.provenance["band"], "units_ns": units_of(predicted),
            "checks": {check.name: f"{check.status}: {check.detail}" for check in checks},
        }
    row["measured"] = {
        "step_times_ns": own.measured.ranks[0].step_times_ns, "units_ns": units_of(own.measured),
    }
    checks = row["calibrated"]["checks"]
    sys.stderr.write(f"{scenario.name}: {checks['step time']}; {checks['time by unit']}\n")
    return row


def units_of(run: RunRecord) -> dict[str, int]:
    """Nanoseconds of each unit of rank 0."""
    own = run.ranks[0]
    return time_by_unit(own, own.recorded_step_ns or run.step_time_ns or 1)


def real_ranks(device: str, left_s: float, names: Sequence[str]) -> dict[str, Any]:
    """The comparisons of real ranks that share the device, as `zsim validate` prints them."""
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        slurm = ROOT / "tests/support/launchers/slurm.py"
        launch = f"{sys.executable} {slurm} {{ranks}} {{worker}}"
        files = [str(PARITY / f"{name}.toml") for name in names]
        return json_of([
            "validate", *files, "--against", backend, "--launch", launch, "--save", folder,
            "--timeout", "60",
        ], left_s=left_s)


def json_of(arguments: list[str], *, left_s: float) -> dict[str, Any]:
    """Exit code and JSON of a command of zsim, or why there is none."""
    command = [sys.executable, "-m", "zsim", *arguments, "--json"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, left_s), cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"not_measured": "no time was left"}
    try:
        printed = ended.stdout[ended.stdout.index("{"):]  # NCCL may print its version first
        return {"exit_code": ended.returncode, "result": json.loads(printed)}
    except ValueError:
        return {"exit_code": ended.returncode, "stderr": ended.stderr[-2000:]}


def measure(
    device: str, parts: Collection[str], out: Path | None, *, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """The record, written after each part: each part with its provenance and seconds."""
    began = time.monotonic()
    record: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    provenance = {
        "command": "python -m tests.measured.gpu", "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "driver": driver() if device == "cuda" else None, "torch": torch.__version__,
        "cuda": torch.version.cuda, "nccl": nccl() if device == "cuda" else None,
        "python": platform.python_version(), "cores": os.cpu_count(),
    }

    def note(part: str, measured: Any) -> None:
        seconds = round(time.monotonic() - began, 1)
        record[part] = {"provenance": provenance, "after_s": seconds, "measured": measured}
        sys.stderr.write(f"{part}: after {seconds} s\n")
        if out:
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        if "operators" in parts:
            note("operators", operators(device, folder))
        if "steps" in parts:
            rows: list[dict[str, Any]] = []
            for row in steps(device, folder, began + limit_s / 2):
                rows.append(row)
                note("steps", rows)
    with ThreadPoolExecutor() as threads:
        left_s = limit_s - (time.monotonic() - began)
        names = PARITY_SCENARIOS[device] if "ranks" in parts else ()
        beside = threads.submit(real_ranks, device, left_s, names) if names else None
        if "memory" in parts:
            note("memory", memory_rows(device, began + limit_s - 60))
        if beside:
            note("ranks", beside.result())
    return record


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
    return text


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
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all parts")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measure(device, options.parts, options.out, limit_s=options.limit)


if __name__ == "__main__":
    main()
