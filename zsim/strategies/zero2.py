"""ZeRO-2: as ZeRO-1, and gradients are reduce-scattered during backward: each rank keeps its shard,
the whole is freed.

With `sync = "last"` the whole gradients live through all micro-batches. Replicas of shards are as
in zero1.py. Source: Rajbhandari et al., arXiv 1910.02054, §5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.strategies import zero1
from zsim.strategies.building.training import Training
from zsim.strategies.flat_buffer import host_buffers
from zsim.strategies.flat_buffer.flat_buffer_step import FlatBufferStep
from zsim.strategies.flat_buffer.groups import (
    Granularity,
    Grouping,
    num_groups,
    saved_buffers,
)
from zsim.strategies.flat_buffer.layout import FlatModel
from zsim.strategies.flat_buffer.step_class import step_class
from zsim.strategies.strategy import Formula, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of ZeRO-2: its flat buffers."""

    granularity: Granularity = "unit"
    """A flat buffer for each "unit" or "parameter", or buckets of a size, as "25 MiB"."""

    @property
    def grouping(self) -> Grouping:
        """The rule of the flat buffers."""
        return Grouping(granularity=self.granularity)


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of one step; where one rank is a group there is nothing to shard and it is
    ZeRO-1's."""
    model = FlatModel.cut(training, mesh=mesh, grouping=options.grouping)
    if model.num_shards == 1:
        return zero1.plan_cut(model, mesh=mesh)
    step = step_class(model)(model)
    zero1.forward_backward(step, FlatBufferStep.reduce_scatter_gradients)
    return zero1.program(step, mesh=mesh)


STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_replicate", "dp_shard"), formula=Formula("zero2"),
    library="zsim", configs=("deepspeed",), nests="buffers",
    offloadable=("optimizer",),
    pinned=host_buffers.pinned,
    on_drives=("optimizer",),
    drive_nbytes=host_buffers.drive_nbytes,
    saves="buffers", flat_buffers=saved_buffers,
    num_groups=num_groups, shards_more="zero3", over_all_ranks="zero2",
)
