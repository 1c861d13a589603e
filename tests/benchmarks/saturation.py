"""Curves of what offloading shares, as ranks of a node fill it, and what offloading gains as
batches grow: `python -m tests.benchmarks.saturation [CLUSTER]`.

Simulated, for any preset of a cluster; zsim/strategies/README.md has the tables of dgx-a100.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import Execution
from zsim.engine.simulate import simulate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Location, Stream
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.scenario import Scenario
from zsim.strategies.building.step_builder import StepBuilder, spmd

NBYTES = 10**9
GB = 10**9
RANKS = (1, 2, 4, 8)
DEPTHS = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 2, 4, 8, 16)
COPIES: Mapping[str, tuple[tuple[str, Location, Stream], ...]] = {
    "to the host": (("to_host", "link", "to_host"),),
    "both ways": (("to_host", "link", "to_host"), ("to_device", "link", "to_device")),
    "pageable": (("to_host_pageable", "link", "to_host"),),
    "step of AdamW": (("adamw.fused", "host", "host"),),
    "drives, read": (("read", "drive", "drive_read"),),
    "drives, write": (("write", "drive", "drive_write"),),
}
"""Operators that a rank runs at once, each with its place and its stream, by the name of a curve.
"""
WAYS = {
    "optimizer": {"optimizer": "cpu", "adam": "deepspeed"},
    "checkpoint_inputs": {"activations": "checkpoint_inputs"},
    "saved_tensors": {"activations": "saved_tensors"},
}


def rate(
    curve: str, ranks: int, *, cluster: str = "dgx-a100", execution: Execution | None = None
) -> float:
    """Bytes/s of a rank, as so many of a node do the same at once, in all that it does."""
    step = StepBuilder()
    for operator, location, stream in COPIES[curve]:
        kernels = (Kernel(operator, 0, NBYTES, "float32", location),)
        step.issue("copy", operator, stream=stream, kernels=kernels)
    mesh = Mesh(dp_replicate=1, dp_shard=ranks)
    program = spmd(mesh, construction=StepBuilder(), first=StepBuilder(), steady=step)
    costs = Costs(load_cluster(cluster, ranks=ranks), execution or Execution())
    times = simulate(program, costs=costs, all_ranks=True).ranks.values()
    (took,) = {max(each.ends) - max(each.starts) for each in times}
    return len(COPIES[curve]) * NBYTES * 10**9 / took


def step_ns(
    *, micro_batch: int = 1, accumulation: int = 1, checkpointing: str = "none",
    offload: Mapping[str, str], cluster: str = "dgx-a100",
) -> int:
    """A step of 7B under zero2 on a node, 4,096 tokens a sequence."""
    case = Scenario(
        model={"preset": "llama-2-7b"},
        batch={"micro_batch": micro_batch, "sequence_length": 4096, "accumulation": accumulation},
        cluster={"preset": cluster}, strategy={"name": "zero2", "sync": "last"},
        precision={"parameters": "bf16", "reduce": "bf16"},
        optimizer={"implementation": "fused"}, offload=dict(offload),
        activation_checkpointing={"mode": checkpointing},
    )
    took = SimBackend().run(case, options=RunOptions()).step_time_ns
    assert took is not None
    return took


def shared(cluster: str) -> Iterator[str]:
    """GB/s of each rank by the ranks that do the same at once."""
    curves = [name for name in COPIES if load_cluster(cluster).drives or "drives" not in name]
    yield f"| ranks | {' | '.join(curves)} |"
    yield "|---" * (len(curves) + 1) + "|"
    for ranks in RANKS:
        rates = [f"{rate(name, ranks, cluster=cluster) / GB:.1f}" for name in curves]
        yield f"| {ranks} | {' | '.join(rates)} |"


def queued(cluster: str) -> Iterator[str]:
    """GB/s that a rank reads of drives by its requests of 1 MiB at once, alone and in a full node.
    """
    yield "| queue_depth | " + " | ".join(map(str, DEPTHS)) + " |"
    yield "|---" * (len(DEPTHS) + 1) + "|"
    for ranks in (RANKS[0], RANKS[-1]):
        rates = [
            rate("drives, read", ranks, cluster=cluster,
                 execution=Execution(drive_queue_nbytes=depth * 2**20)) / GB
            for depth in DEPTHS
        ]
        yield f"| {ranks} of a node | " + " | ".join(f"{each:.1f}" for each in rates) + " |"


def paying(cluster: str, sizes: Sequence[int] = BATCHES) -> Iterator[str]:
    """Speed with offloading and twice the micro-batch, over speed without: what the memory buys
    that it frees. Every block is checkpointed."""
    kept = {
        size: step_ns(micro_batch=size, checkpointing="full", offload={}, cluster=cluster)
        for size in sizes
    }
    yield "| offloaded | " + " | ".join(f"{size} → {2 * size}" for size in sizes) + " |"
    yield "|---" * (len(sizes) + 1) + "|"
    for way, offload in WAYS.items():
        gains = [
            2 * kept[size] / step_ns(
                micro_batch=2 * size, checkpointing="full", offload=offload, cluster=cluster
            )
            for size in sizes
        ]
        yield f"| {way} | " + " | ".join(f"{gain:.2f}" for gain in gains) + " |"


def lines(cluster: str) -> Iterator[str]:
    """All tables of a cluster, one after another."""
    yield from (*shared(cluster), "")
    if load_cluster(cluster).drives:
        yield from (*queued(cluster), "")
    yield from paying(cluster)


if __name__ == "__main__":
    sys.stdout.writelines(f"{each}\n" for each in lines((*sys.argv, "dgx-a100")[1]))
