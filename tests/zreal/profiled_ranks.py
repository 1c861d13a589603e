"""Ranks that profile torch's own step of a scenario, as its user would."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from zreal.observer.observer import observe
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.scenario.scenario import load

SETTLED_S = 0.05
"""Pause before the profiler moves on. Gloo's threads end their records a moment after the step, and
torch's profiler may damage its memory if it stops meanwhile."""


def profiled(arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any) -> str:
    """Take four steps, the last two profiled; returns the trace's path."""
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    step = observe(load(arguments["scenario"]), rank=rank).plain_step
    path = f"{arguments['folder']}/rank-{rank}.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=arguments["shapes"],
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
    ) as profiler:
        for _turn in range(4):
            step()
            time.sleep(SETTLED_S)
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()
    return path
