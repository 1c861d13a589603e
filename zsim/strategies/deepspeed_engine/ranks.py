"""Programs of all ranks at stages 1 and 2. What they share is built once, and each kind of rank
ends it with its own part."""

from __future__ import annotations

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program, RankProgram
from zsim.models.spec import ModelSpec
from zsim.strategies.building.step_builder import StepBuilder, rank_program
from zsim.strategies.deepspeed_engine.construction import construction
from zsim.strategies.deepspeed_engine.offload import partitioned_optimizer
from zsim.strategies.deepspeed_engine.offload.partitioned import OffloadedPartitionedStep
from zsim.strategies.deepspeed_engine.optimizer import optimizer_step
from zsim.strategies.deepspeed_engine.partition import FlatPartition
from zsim.strategies.deepspeed_engine.step import PartitionedStep


def step_of(flat: FlatPartition, *, in_hooks: bool, drops_others: bool) -> PartitionedStep:
    """An empty step, of one rank with states on its device or on the host."""
    kind = OffloadedPartitionedStep if flat.training.offload.optimizer else PartitionedStep
    return kind.of(flat, in_hooks=in_hooks, drops_others=drops_others)


def of_ranks(step: PartitionedStep, *, mesh: Mesh) -> Program:
    """The Program of the ops of `step`, after which each rank steps its part. Ranks whose parts cut
    parameters alike share one."""
    built = tuple(construction(step.flat).ops)
    offloads = step.flat.training.offload.optimizer
    end = partitioned_optimizer.optimizer_step if offloads else optimizer_step
    kinds: dict[tuple[object, ...], int] = {}
    programs: list[RankProgram] = []
    assignment: list[int] = []
    for share in step.flat.shares:
        kind = kinds.setdefault(step.kind_of(share), len(kinds))
        assignment.append(kind)
        if kind == len(programs):
            first, steady = (
                StepBuilder(step.of_rank(share, first=is_first), list(step.step.parts))
                for is_first in (True, False)
            )
            for builder in (first, steady):
                end(builder, step.flat, share, first=builder is first)
            programs.append(rank_program(built, first=first, steady=steady))
    return Program(mesh=mesh, ranks=tuple(programs), assignment=tuple(assignment))


def num_distinct_ranks(model: ModelSpec, mesh: Mesh) -> int:
    """Most kinds of ranks: those in which a parameter begins, those inside one, and those that own
    padding alone."""
    return min(mesh.dp_shard, 2 * len(model.parameters) + 1)
