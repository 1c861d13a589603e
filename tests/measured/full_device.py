"""The driver's calls on a full GPU: `python -m tests.measured.full_device --out full_device.json`.

1. Times of cudaMalloc and cudaFree by size, alone and while a kernel runs, and of a cudaMalloc that
   finds no memory.
2. Steps of one rank on the fake process group, with all of the device's memory and with less than
   they reserve. Of each step: its time, and how often torch gave all cached memory back, took a
   segment and gave one back.

It needs torch and a GPU that nothing else uses.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zsim
from tests.measured.gpu import driver
from zreal import torch_private
from zreal.observer.observer import observe

MIB, GIB = 2**20, 2**30
SIZES = (2 * MIB, 20 * MIB, 100 * MIB, 500 * MIB, 2 * GIB, 8 * GIB)
MOST, MOST_BYTES = 16, 48 * GIB
"""Most segments of a size, and most bytes of them together."""
CYCLES = 100_000_000
"""Cycles of a kernel that only waits, some 60 ms."""
STEPS = (("fsdp2", 1, 4, 2048), ("fsdp2", 8, 4, 2048), ("fsdp2", 8, 1, 2048), ("ddp", 1, 4, 2048))
"""Strategy, ranks, micro-batch and sequence length."""
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.02)
"""Limits, as shares of what lies between live and reserved bytes."""
NUM_STEPS = 5
COUNTS = {
    "releases": "num_alloc_retries", "allocations": "segment.all.allocated",
    "frees": "segment.all.freed",
}


def driver_calls() -> dict[str, Any]:
    """Nanoseconds of each call, by size."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    torch.zeros(1, device="cuda")

    def allocate(nbytes: int) -> tuple[ctypes.c_void_p, int, int]:
        pointer = ctypes.c_void_p()
        begin = time.perf_counter_ns()
        error = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return pointer, time.perf_counter_ns() - begin, error

    def free(pointer: ctypes.c_void_p) -> int:
        begin = time.perf_counter_ns()
        runtime.cudaFree(pointer)
        return time.perf_counter_ns() - begin

    by_size: dict[str, Any] = {}
    for nbytes in SIZES:
        made = [allocate(nbytes) for _ in range(min(MOST, MOST_BYTES // nbytes))]
        by_size[str(nbytes)] = {
            "allocate_ns": [ns for _, ns, _ in made],
            "free_ns": [free(pointer) for pointer, _, _ in made],
        }
    torch.cuda.synchronize()
    beside: dict[str, int] = {}
    torch.cuda._sleep(CYCLES)
    begin = time.perf_counter_ns()
    pointer, beside["allocate_ns"], _ = allocate(100 * MIB)
    beside["free_ns"] = free(pointer)
    torch.cuda.synchronize()
    beside["kernel_ns"] = time.perf_counter_ns() - begin
    total = torch.cuda.get_device_properties(0).total_memory
    failed = [allocate(2 * total)[1:] for _ in range(MOST)]
    runtime.cudaGetLastError()
    return {"by_size": by_size, "beside_a_kernel": beside, "failed": failed}


def scenario_of(strategy: str, ranks: int, micro_batch: int, length: int) -> zsim.Scenario:
    """One of STEPS."""
    return zsim.Scenario(
        model={"preset": "llama-3.2-1b"}, strategy={"name": strategy},
        batch={"micro_batch": micro_batch, "sequence_length": length},
        cluster={"preset": "dgx-h100", "ranks": ranks}, precision={"parameters": "bf16"},
        name=f"llama-3.2-1b-{strategy}-{ranks}-{micro_batch}x{length}",
    )


def steps(scenario: zsim.Scenario) -> Iterator[dict[str, Any]]:
    """The steps of `scenario` under each limit, beginning with none."""
    total = torch.cuda.get_device_properties(0).total_memory
    with torch_private.fake_group(rank=0, world_size=scenario.world_size):
        step = observe(scenario, rank=0, device="cuda").plain_step
        torch_private.clear_cublas_workspaces()
        free = measured(step)
        yield free
        live, reserved = free["peak_active_bytes"], free["peak_reserved_bytes"]
        for share in SHARES:
            limit = live + round(share * (reserved - live))
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
            try:
                yield {"limit": limit, **measured(step)}
            except torch.OutOfMemoryError as error:
                yield {"limit": limit, "out_of_memory": str(error)[:200]}
                break
        torch.cuda.set_per_process_memory_fraction(1.0)


def measured(step: Any) -> dict[str, Any]:
    """Time and counts of each of some steps from an empty cache on, and the peaks of all."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rows = []
    for _ in range(NUM_STEPS):
        before = torch.cuda.memory_stats()
        begin = time.perf_counter_ns()
        step()
        torch.cuda.synchronize()
        ns, after = time.perf_counter_ns() - begin, torch.cuda.memory_stats()
        rows.append({"ns": ns} | {name: after[key] - before[key] for name, key in COUNTS.items()})
    peaks = torch.cuda.memory_stats()
    return {
        "peak_active_bytes": peaks["active_bytes.all.peak"],
        "peak_reserved_bytes": peaks["reserved_bytes.all.peak"], "steps": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "provenance": {
            "command": "python -m tests.measured.full_device", "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "driver": driver(), "python": platform.python_version(),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        },
        "driver_calls": driver_calls(), "steps": {},
    }
    for case in STEPS:
        scenario = scenario_of(*case)
        rows = record["steps"][scenario.name] = {"scenario": scenario.to_dict(), "limits": []}
        try:
            for row in steps(scenario):
                rows["limits"].append(row)
                options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                sys.stderr.write(f"{scenario.name}: {row}\n")
        except (RuntimeError, zsim.ZsimError) as error:  # of this scenario alone
            rows["not_measured"] = f"{type(error).__name__}: {str(error)[:300]}"
            sys.stderr.write(f"{scenario.name}: {rows['not_measured']}\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
