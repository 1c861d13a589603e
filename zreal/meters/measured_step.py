"""A measured step: device mesh, meters and recorder around the training loop of both interpreters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zreal.meters.collectives import CollectiveRecorder, GroupName
from zreal.meters.memory import MemoryMeter
from zsim.ir.program import PartName
from zsim.ir.run import PhaseRecord
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES


class Begin(Protocol):
    """Says that a part of the step begins."""

    def __call__(self, part: PartName, /, *, micro_batch: int = 0) -> None: ...


def device_mesh(scenario: Scenario, *, device: str) -> tuple[DeviceMesh, dict[str, GroupName]]:
    """The scenario's mesh as torch has it (2-D where there are replicas of shards), and c10d's
    group names as axes."""
    mesh = scenario.mesh
    sizes = [
        (axis, size)
        for axis, size in (("dp_replicate", mesh.dp_replicate), ("dp_shard", mesh.dp_shard))
    ]
    used = [item for item in sizes if item[0] in STRATEGIES[scenario.strategy].axes]
    if len(used) > 1 and mesh.dp_replicate == 1:
        used = used[1:]  # one replica is no axis: torch would reduce over it all the same
    torch_mesh = init_device_mesh(
        device, tuple(size for _, size in used), mesh_dim_names=tuple(axis for axis, _ in used)
    )
    groups = {}
    for axis, size in used:
        group = torch_mesh.get_group(axis)
        groups[str(group.group_name)] = GroupName(
            axis, size, tuple(dist.get_process_group_ranks(group))
        )
    return torch_mesh, groups


def beginning(
    meter: MemoryMeter, recorder: CollectiveRecorder, phases: Mapping[str, PhaseRecord]
) -> Begin:
    """Parts of the first step, which is measured once, begin when nothing is in flight; of other
    steps the optimizer's alone does."""

    def begin(part: PartName, /, *, micro_batch: int = 0) -> None:
        if part == "optimizer" or "first" not in phases:
            recorder.settle()
        meter.begin(part, micro_batch=micro_batch)

    return begin


def lower(before: PhaseRecord | None, now: PhaseRecord) -> PhaseRecord:
    """The one with the lower peak, its ends and each of its parts as low as in either; the later if
    their collectives differ."""
    if before is None or before.collectives != now.collectives:
        return now
    lowest = min(before, now, key=lambda phase: phase.memory.peak_bytes)
    parts = tuple(
        replace(
            one, start_bytes=min(one.start_bytes, other.start_bytes),
            peak_bytes=min(one.peak_bytes, other.peak_bytes),
        )
        for one, other in zip(before.memory.parts, now.memory.parts, strict=True)
    )
    start = min(before.memory.start_bytes, now.memory.start_bytes)
    end = min(before.memory.end_bytes, now.memory.end_bytes)
    return replace(
        lowest, memory=replace(lowest.memory, parts=parts, start_bytes=start, end_bytes=end)
    )
