"""Work that goes on until a GPU is hot: `python -m tests.measured.sustained --out FILE`.

1. Products of random numbers, one after another for `SECONDS`: their rate in each window, with the
   clocks, power and temperature that nvidia-smi tells.
2. Steps of one rank of Llama 3.2 1B for as long: the median time of a step in each window.
3. Attention by the kernels that torch has, forward and backward, and norms: alone, from rest.

Single products and short steps run from a cool GPU, whose clocks nothing limits. Training does not.
It needs torch and no network. Without a GPU it runs small shapes on the CPU, so that every line of
it is tried.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import zsim
from tests.measured.gpu import driver, nccl, preset_here
from zreal import torch_private
from zreal.observer.observer import observe

SECONDS, WINDOW_S = {"cuda": 40.0, "cpu": 0.5}, {"cuda": 3.0, "cpu": 0.25}
SIDE = {"cuda": 8192, "cpu": 256}
TOKENS = {"cuda": 16_384, "cpu": 256}
LENGTHS = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128,)}
HIDDEN = {"cuda": (768, 2048, 4096), "cpu": (64,)}
BACKENDS = {
    "cuda": {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
    "cpu": {"math": SDPBackend.MATH},
}
QUERY = ("clocks.sm", "power.draw", "temperature.gpu")
REPEATS = 20
BUSY_NS = 4e8
"""Nanoseconds of work that nvidia-smi is asked beside."""


def state() -> dict[str, float]:
    """Clock in MHz, power in W and temperature in °C of the first GPU; empty without one."""
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return dict(zip(QUERY, map(float, told.splitlines()[0].split(",")), strict=True))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}


def timed_ns(work: Callable[[], object], device: str, *, repeats: int) -> list[int]:
    """Nanoseconds of each of `repeats` runs of `work`, by the device's own clock."""
    if device == "cpu":
        times = []
        for _ in range(repeats):
            began = time.perf_counter_ns()
            work()
            times.append(time.perf_counter_ns() - began)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [
        round(1e6 * first.elapsed_time(second))
        for first, second in zip(marks, marks[1:], strict=False)
    ]


def windows(work: Callable[[], object], device: str) -> Iterator[dict[str, Any]]:
    """Median nanoseconds of `work` in each window of a run that never rests, and the GPU's state at
    its end."""
    began = time.monotonic()
    work()
    while (now := time.monotonic()) < began + SECONDS[device]:
        times: list[int] = []
        while time.monotonic() < now + WINDOW_S[device]:
            times += timed_ns(work, device, repeats=REPEATS)
        # asked while the device still works
        for _ in range(ceil(BUSY_NS / median(times))):
            work()
        told = state()
        yield {"after_s": round(time.monotonic() - began, 1), "median_ns": median(times), **told}


def products(device: str) -> dict[str, Any]:
    """Windows of square products in bfloat16."""
    side = SIDE[device]
    first, second = (
        torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    out = torch.empty_like(first)
    rows = [*windows(lambda: torch.mm(first, second, out=out), device)]
    return {"flops": 2 * side**3, "windows": rows}


def steps(device: str) -> dict[str, Any]:
    """Windows of steps of one rank alone."""
    scenario = zsim.Scenario(
        model={"preset": "llama-3.2-1b" if device == "cuda" else "llama-tiny"},
        batch={"micro_batch": 4, "sequence_length": 2048 if device == "cuda" else 64},
        cluster={"preset": preset_here() if device == "cuda" else "cpu-gloo", "ranks": 1},
        strategy={"name": "fsdp2"}, precision={"parameters": "bf16"},
    )
    with torch_private.fake_group(rank=0, world_size=1):
        trained = observe(scenario, rank=0, device=device)
        rows = [*windows(trained.plain_step, device)]
    return {"scenario": scenario.to_dict(), "windows": rows}


def kernels(device: str) -> Iterator[dict[str, Any]]:
    """Median nanoseconds of single kernels, forward and backward."""
    for name, backend in BACKENDS[device].items():
        for width in (64, 128):
            for length in LENGTHS[device]:
                count = 16 * TOKENS[device] // length
                query, key, value = (
                    torch.randn(
                        1, count, length, width, dtype=torch.bfloat16, device=device,
                        requires_grad=True,
                    ) for _ in range(3)
                )

                def attend(
                    query: Any = query, key: Any = key, value: Any = value, backend: Any = backend
                ) -> Any:
                    with sdpa_kernel(backend):
                        return functional.scaled_dot_product_attention(
                            query, key, value, is_causal=True
                        )

                yield {"kernel": f"attention {name}", "shape": [count, length, length, width],
                       **both_ways(attend, device)}
    for hidden in HIDDEN[device]:
        rows = torch.randn(
            TOKENS[device], hidden, dtype=torch.bfloat16, device=device, requires_grad=True
        )
        for norm in (torch.nn.LayerNorm, torch.nn.RMSNorm):
            module = norm(hidden, dtype=torch.bfloat16, device=device)
            yield {"kernel": norm.__name__, "shape": [TOKENS[device], hidden],
                   **both_ways(lambda module=module, rows=rows: module(rows), device)}


def both_ways(forward: Callable[[], Any], device: str) -> dict[str, float]:
    """Median nanoseconds of `forward` and of its backward."""
    made = forward()
    gradient = torch.ones_like(made)
    for _ in range(3):
        forward()
        made.backward(gradient, retain_graph=True)
    return {
        "forward_ns": median(timed_ns(forward, device, repeats=REPEATS)),
        "backward_ns": median(timed_ns(
            lambda: made.backward(gradient, retain_graph=True), device, repeats=REPEATS
        )),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    out = parser.parse_args().out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {"provenance": {
        "command": "python -m tests.measured.sustained", "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "driver": driver() if device == "cuda" else None, "torch": torch.__version__,
        "cuda": torch.version.cuda, "nccl": nccl() if device == "cuda" else None,
        "python": platform.python_version(),
    }}
    for part, measure in (
        ("kernels", lambda: [*kernels(device)]), ("products", lambda: products(device)),
        ("steps", lambda: steps(device)),
    ):
        record[part] = measure()
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
