"""Prediction of what torch's caching allocator holds on each rank in a steady step.

It knows no measured Run; `zsim.runs.compare.memory.cache` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.cluster.cluster import ClusterSpec
from zsim.ir.program import Program, RankProgram
from zsim.ir.run import CacheRecord, MemoryRecord
from zsim.memory.allocator import reserved
from zsim.memory.inputs_and_buffers import belongings
from zsim.memory.non_torch import NonTorchMemory, cublas_workspace, total
from zsim.scenario.scenario import Scenario


def cache_records(
    scenario: Scenario, program: Program, cluster: ClusterSpec,
    steady: Mapping[int, MemoryRecord],
) -> dict[int, CacheRecord]:
    """The record of each rank in `steady`, whose allocated bytes those are.

    Inputs, buffers of the module and cuBLAS's workspaces are added. ZsimError for a device whose
    workspaces are not known.
    """
    workspace, besides = cublas_workspace(cluster.device), total(belongings(scenario))
    kinds: dict[int, reserved.AllocatorRecord] = {}
    for kind in sorted({program.assignment[rank] for rank in steady}):
        kinds[kind] = _steady(
            program.ranks[kind], workspace, expandable_segments=scenario.expandable_segments
        )
    return {
        rank: _record(kinds[program.assignment[rank]], memory, besides)
        for rank, memory in steady.items()
    }


def _steady(
    program: RankProgram, workspace: int, *, expandable_segments: bool
) -> reserved.AllocatorRecord:
    records = reserved.replay(
        program, expandable_segments=expandable_segments, workspace_bytes=workspace,
        empty_cache="steady",  # as zreal does, before the steps that it measures
    )
    return records["steady"]


def _record(
    replayed: reserved.AllocatorRecord, memory: MemoryRecord, besides: NonTorchMemory
) -> CacheRecord:
    live = replayed.peak_active_bytes + besides.nbytes
    always = besides.nbytes + replayed.workspace_bytes
    return CacheRecord(
        start_bytes=memory.start_bytes + always, peak_bytes=memory.peak_bytes + always,
        allocated_bytes=live, active_bytes=live,
        reserved_bytes=replayed.peak_reserved_bytes + besides.high,
        releases=replayed.num_releases, segments=replayed.num_segments,
    )
