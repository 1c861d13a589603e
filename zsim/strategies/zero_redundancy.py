"""torch's ZeroRedundancyOptimizer under DDP: parameters and gradients stay whole, each optimizer
state has one owner.

Whole parameters go greedily to ranks, largest first; after its own step every rank broadcasts each
parameter it owns. Ranks differ, so each has its own program. The optimizer steps the parameters in
their own dtype, without a master copy. Source:
torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program, RankProgram
from zsim.ir.sharding import greedy_owners
from zsim.models.spec import ModelSpec, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies import ddp
from zsim.strategies.building.step_builder import StepBuilder, rank_program
from zsim.strategies.building.training import Training
from zsim.strategies.ddp import Options
from zsim.strategies.replicated import buckets
from zsim.strategies.replicated import construction as replicated_construction
from zsim.strategies.replicated.buckets import ReplicatedModel
from zsim.strategies.replicated.replicated_step import ReplicatedStep
from zsim.strategies.strategy import Formula

__all__ = ["STRATEGY", "Options", "num_distinct_ranks", "owned_parameters", "plan"]


def owned_parameters(training: Training, *, num_ranks: int) -> tuple[tuple[Parameter, ...], ...]:
    """Parameters that each rank owns, largest first, as the optimizer keeps them; with unused ones,
    which it never steps."""
    parameters = buckets.reduced_parameters(training.model)
    owners = greedy_owners([parameter.numel for parameter in parameters], num_ranks=num_ranks)
    owned: list[list[Parameter]] = [[] for _ in range(num_ranks)]
    for parameter, owner in sorted(
        zip(parameters, owners, strict=True), key=lambda pair: -pair[0].numel
    ):
        owned[owner].append(parameter)
    return tuple(map(tuple, owned))


def num_distinct_ranks(model: ModelSpec, mesh: Mesh) -> int:
    """Most ranks with programs of their own: an owner for each parameter, and those that own
    none."""
    return min(mesh.dp_replicate, len(model.parameters) + 1)


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Programs of one step on the axis dp_replicate; ranks whose parameters are as large, one
    by one, share one."""
    model = ddp.under_ddp(training, mesh=mesh, options=options)
    owned = owned_parameters(training, num_ranks=model.num_replicas)
    construction = tuple(replicated_construction.construction(model, has_master=False).ops)
    trained = training.model.trained
    kinds: dict[tuple[int, ...], int] = {}
    programs: list[RankProgram] = []
    assignment: list[int] = []
    same = ddp.both_steps(model)
    second = ddp.rebuilding(same[0])
    for parameters in owned:
        stepped = tuple(parameter.numel for parameter in parameters if parameter.fqn in trained)
        kind = kinds.setdefault(stepped, len(kinds))
        assignment.append(kind)
        if kind == len(programs):
            first, steady = (
                _step(step.copy(), owned, stepped=stepped, first=step is same[0]) for step in same
            )
            programs.append(rank_program(construction, first=first, steady=steady, second=second))
    return Program(mesh=mesh, ranks=tuple(programs), assignment=tuple(assignment))


def _step(
    step: ReplicatedStep, owned: tuple[tuple[Parameter, ...], ...], *, stepped: tuple[int, ...],
    first: bool,
) -> StepBuilder:
    """The end of a step whose beginning is the same on every rank."""
    model = step.model
    done = step.optimizer(stepped, first=first, has_master=False)
    if model.num_replicas > 1:
        _broadcast(step.step, model, owned, after=done)
    step.zero_grad()
    return step.step


def _broadcast(
    step: StepBuilder, model: ReplicatedModel, owned: tuple[tuple[Parameter, ...], ...], *,
    after: int
) -> None:
    """Parameter by parameter, all of rank 0's first."""
    for root, parameters in enumerate(owned):
        for parameter in parameters:
            step.issue(
                "broadcast",
                parameter.fqn,
                stream="all_gather",
                waits=(after,),
                group=buckets.AXIS,
                nbytes=parameter.numel * DTYPE_NBYTES[model.dtype],
                root=root,
                dtype=model.dtype,
            )


STRATEGY = replace(
    ddp.STRATEGY, plan=plan, formula=Formula("zero1", keeps="no master copy"), saves="",
    library="zero_redundancy", configs=(), wraps_optimizer=True,
    num_distinct_ranks=num_distinct_ranks, shards_more="zero2",
)
