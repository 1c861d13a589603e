"""hsdp: fsdp2 on a 2-D mesh. Parameters are sharded over dp_shard and copied over dp_replicate,
where gradients are all-reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.strategies import fsdp2
from zsim.strategies.building.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(fsdp2.Options):
    """fsdp2's options, and `all_reduce`: after "every" micro-batch that synchronises, or the "last"
    only (set_requires_all_reduce).

    With "last" each rank keeps its shard of what the others of its dp_shard group summed, until the
    step's last micro-batch.
    """

    all_reduce: fsdp2.AllReduceAfter = "every"


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of every rank, as fsdp2 plans it."""
    return fsdp2.plan(training, mesh=mesh, options=options, all_reduce=options.all_reduce)


STRATEGY = replace(
    fsdp2.STRATEGY, plan=plan, options=Options, axes=("dp_replicate", "dp_shard"),
    over_all_ranks="fsdp2", keeps_gathered=(),  # over replicas, to shard less comes first
)
