"""Programs of all ranks at stages 1 and 2. What they share is built once, and each kind of rank
ends it with its own part."""

from __future__ import annotations

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program, RankProgram
from zsim.models.spec import ModelSpec
from zsim.strategies.building.step_builder import StepBuilder, rank_program
from zsim.strategies.deepspeed_engine.construction import construction
from zsim.strategies.deepspeed_engine.optimizer import optimizer_step
from zsim.strategies.deepspeed_engine.step import PartitionedStep


def of_ranks(step: PartitionedStep, *, mesh: Mesh) -> Program:
    """The Program of the ops of `step`, after which each rank steps its part. Ranks whose parts cut
    parameters alike share one."""
    built = tuple(construction(step.flat).ops)
    kinds: dict[tuple[object, ...], int] = {}
    programs: list[RankProgram] = []
    assignment: list[int] = []
    for share in step.flat.shares:
        kind = kinds.setdefault(step.kind_of(share), len(kinds))
        assignment.append(kind)
        if kind == len(programs):
            ops = step.of_rank(share)
            first, steady = StepBuilder(list(ops), list(step.step.parts)), StepBuilder(
                list(ops), list(step.step.parts)
            )
            for builder in (first, steady):
                optimizer_step(builder, step.flat, share, first=builder is first)
            programs.append(rank_program(built, first=first, steady=steady))
    return Program(mesh=mesh, ranks=tuple(programs), assignment=tuple(assignment))


def num_distinct_ranks(model: ModelSpec, mesh: Mesh) -> int:
    """Most kinds of ranks: those in which a parameter begins, those inside one, and those that own
    padding alone."""
    return min(mesh.dp_shard, 2 * len(model.parameters) + 1)
