"""ZeRO-1: every rank keeps all parameters and gradients, and steps only its own shard of the
optimizer's states.

"all_reduce" averages whole gradients and uses a slice of them: 50 % more traffic than DDP.
"reduce_scatter" averages only the slice that is used: as much traffic as DDP. Both all-gather the
stepped parameters. Parameters without a gradient lie in flat buffers of their own, which are not
reduced, stepped or gathered. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", arXiv 1910.02054, §5.1.

With dp_replicate × dp_shard ranks each group of dp_shard shards by itself, and only gradients leave
it. They are reduced in the group, and summed there over micro-batches. At the end of accumulation
each rank all-reduces its shard of the sum over replicas: the two hops of MiCS (Zhang et al., arXiv
2205.00119), for all three stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.strategies.building import step_builder
from zsim.strategies.building.training import Training
from zsim.strategies.flat_buffer import host_buffers, layout
from zsim.strategies.flat_buffer.flat_buffer_step import FlatBufferStep
from zsim.strategies.flat_buffer.groups import (
    FlatGroup,
    Granularity,
    Grouping,
    num_groups,
    saved_buffers,
)
from zsim.strategies.flat_buffer.layout import FlatModel
from zsim.strategies.flat_buffer.step_class import step_class
from zsim.strategies.strategy import Formula, Strategy

Form = Literal["all_reduce", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of ZeRO-1: its reduction, and its flat buffers."""

    form: Form = "reduce_scatter"
    """The collective that reduces gradients."""
    granularity: Granularity = "unit"
    """A flat buffer for each "unit" or "parameter", or buckets of a size, as "25 MiB"."""

    @property
    def grouping(self) -> Grouping:
        """The rule of the flat buffers."""
        return Grouping(granularity=self.granularity)


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of one step; a mesh of one rank communicates nothing."""
    model = FlatModel.cut(training, mesh=mesh, grouping=options.grouping)
    return plan_cut(model, mesh=mesh, form=options.form)


def plan_cut(model: FlatModel, *, mesh: Mesh, form: Form = "reduce_scatter") -> Program:
    """The Program of one step of a model that is cut already."""
    reduce = (
        FlatBufferStep.all_reduce_gradients
        if form == "all_reduce"
        else FlatBufferStep.reduce_scatter_in_place
    )
    step = step_class(model)(model, gradient_kind="gradients")
    forward_backward(step, reduce)
    return program(step, mesh=mesh)


def program(passes: FlatBufferStep, *, mesh: Mesh) -> Program:
    """The Program of both steps, which have the same `passes` before the optimizer's step."""
    first, steady = passes.copy(), passes.copy()
    finish(first, first=True)
    finish(steady, first=False)
    return step_builder.spmd(
        mesh, construction=layout.construction(passes.model, sharded=passes.sharded),
        first=first.step, steady=steady.step,
    )


def forward_backward(
    step: FlatBufferStep, reduce: Callable[[FlatBufferStep, FlatGroup], None]
) -> None:
    """Every micro-batch; a group's gradients are reduced as soon as the last module that reads it
    has run backward."""
    training = step.model.training
    backward = training.backward_modules
    ready = step.model.last_users(backward)
    for step.micro_batch in range(training.batch.accumulation):
        step.step.begin("forward", micro_batch=step.micro_batch)
        for module in training.modules:
            step.forward(module)
        step.step.begin("backward", micro_batch=step.micro_batch)
        for module in backward:
            step.backward(module)
            for group in [group for group in ready[module.fqn] if group.trained]:
                finish_gradient(step, group, reduce)
        step.release_loss()


def finish_gradient(
    step: FlatBufferStep, group: FlatGroup, reduce: Callable[[FlatBufferStep, FlatGroup], None]
) -> None:
    """Reduce the gradient of a group, to which no module of this micro-batch adds any more."""
    if synchronises(step):
        reduce(step, group)
    if step.in_last_micro_batch:
        step.complete(group)


def synchronises(step: FlatBufferStep) -> bool:
    """True where gradients are reduced in this micro-batch; never on one rank."""
    every = step.in_last_micro_batch or step.model.training.sync == "every"
    return step.over_replicas or (step.model.num_shards > 1 and every)


def finish(step: FlatBufferStep, *, first: bool) -> None:
    """Step the shards and all-gather the parameters that are whole."""
    stepped = step.optimizer(first=first)
    if step.model.num_shards > 1:
        for group in step.model.trained:
            if group.whole or not step.sharded:
                step.all_gather_parameters(group, after=stepped)
    step.zero_grad()


STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_replicate", "dp_shard"), formula=Formula("zero1"),
    library="zsim", configs=("deepspeed",), nests="buffers",
    offloadable=("optimizer",),
    pinned=host_buffers.pinned,
    on_drives=("optimizer",),
    drive_nbytes=host_buffers.drive_nbytes,
    saves="buffers", flat_buffers=saved_buffers,
    num_groups=num_groups, shards_more="zero2", over_all_ranks="zero1",
)
