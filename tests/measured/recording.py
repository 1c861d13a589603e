"""Time of a step with and without the recorder: `python -m tests.measured.recording`.

Two gloo ranks take recorded and unrecorded steps in turn, so that other work on the machine falls
on both alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median_low
from typing import Any

import torch.distributed as dist

from tests.support.folders import PARITY
from zreal.executor.executor import execute
from zreal.meters.clocks import HostClock
from zreal.meters.timeline import TimelineRecorder
from zreal.observer.observer import observe
from zreal.observer.subjects.table import SUBJECTS
from zreal.processes import launch
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.scenario.plan import plan
from zsim.scenario.scenario import load

NAMES = ("ddp-mlp-2", "ddp-gpt-2-bucket-view", "fsdp2-mlp-2", "fsdp2-llama-2-bf16-reduce-fp32",
         "zero3-mlp-2-lookahead-0", "zero2-llama-2-bf16")


class Times:
    """Nanoseconds of steps, by the wall's clock and as computed by this thread alone."""

    def __init__(self) -> None:
        self.wall: list[int] = []
        self.own: list[int] = []

    def take(self, step: Callable[[], object]) -> None:
        """Take a step that all ranks begin together."""
        dist.barrier()
        start, own = time.perf_counter_ns(), time.thread_time_ns()
        step()
        self.own.append(time.thread_time_ns() - own)
        self.wall.append(time.perf_counter_ns() - start)


def rank_times(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> list[list[list[int]]]:
    """Nanoseconds of this rank's unrecorded and recorded steps, by the wall and by its own thread.
    """
    settle()
    scenario = load(PARITY / f"{arguments['name']}.toml")
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    trained = (
        observe(scenario, rank=rank) if scenario.strategy in SUBJECTS
        else execute(scenario, plan(scenario, device="cpu"), rank=rank)
    )
    recorder = TimelineRecorder(
        root=trained.model, units=trained.units, describe=trained.recorder.described,
        clock=HostClock(),
    )
    plain, recorded = Times(), Times()
    for _turn in range(arguments["steps"]):
        plain.take(trained.plain_step)
        with recorder.active():
            recorder.recorded(trained.plain_step)  # as before the steps that a Run keeps
            recorded.take(lambda: recorder.recorded(trained.plain_step))
    dist.barrier()
    dist.destroy_process_group()
    return [[plain.wall, recorded.wall], [plain.own, recorded.own]]


def main() -> None:
    """Medians of each scenario on the slowest rank: by the wall, then by its thread alone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    for name in NAMES:
        ranks = launch.launch(
            "tests.measured.recording:rank_times", {"name": name, "steps": steps}, world_size=2,
            timeout_s=300,
        )
        told = [f"{name:32}"]
        for clock in (0, 1):
            plain, recorded = (
                median_low(
                    [max(turn) for turn in zip(*(rank[clock][i] for rank in ranks), strict=True)]
                )
                for i in (0, 1)
            )
            told.append(f"{plain / 1e6:8.3f} ms {recorded / 1e6:8.3f} ms "
                        f"{recorded / plain - 1:+.1%}")
        sys.stdout.write("  ".join(told) + "\n")


if __name__ == "__main__":
    main()
