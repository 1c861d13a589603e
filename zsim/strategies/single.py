"""single: a plain module and its optimizer on one rank, as PyTorch alone trains them.

No wrapper, no bucket, no collective. Forward and backward run micro-batch by micro-batch; each
parameter keeps its first gradient in `.grad`, to which later ones are added. After the last
micro-batch the optimizer steps, and `zero_grad` frees the gradients. With two-byte parameters and
`precision.master` it steps float32 copies; without, the parameters themselves. Observed on torch
2.13. Sources: torch/csrc/autograd/functions/accumulate_grad.h; torch/optim/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.models.training_options import Optimizer
from zsim.strategies.building.step_builder import StepBuilder, spmd
from zsim.strategies.building.training import Training
from zsim.strategies.replicated import construction
from zsim.strategies.replicated.buckets import ReplicatedModel
from zsim.strategies.replicated.replicated_step import ReplicatedStep
from zsim.strategies.strategy import Formula, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """None: a plain module has no options."""


def problems(options: Options, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """Refusals of more ranks than one, which a plain module does not join."""
    if mesh.world_size > 1:
        yield (
            f"strategy.name: expected a strategy that joins {mesh.world_size:,} ranks, found "
            "single, a plain module on one; use ddp or fsdp2, or cluster.ranks = 1"
        )


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of one step on one rank."""
    model = ReplicatedModel(training=training, rebuilt=(), num_replicas=1, views=False)
    step = ReplicatedStep(model, buckets=())
    forward_backward(step)
    return spmd(
        mesh, construction=construction.parameters_made(model, has_master=model.has_master),
        first=_ended(step.copy(), first=True), steady=_ended(step, first=False),
    )


def forward_backward(step: ReplicatedStep) -> None:
    """Every micro-batch; gradients stay where they are made."""
    training = step.model.training
    for step.micro_batch in range(training.batch.accumulation):
        if step.repeated(synchronises=False):
            continue
        step.step.begin("forward", micro_batch=step.micro_batch)
        for module in training.modules:
            step.forward(module)
        step.step.begin("backward", micro_batch=step.micro_batch)
        for module in training.backward_modules:
            step.backward(module, synchronises=False)


def _ended(step: ReplicatedStep, *, first: bool) -> StepBuilder:
    numels = [parameter.numel for parameter in step.model.trained]
    step.optimizer(numels, first=first, has_master=step.model.has_master)
    step.zero_grad()
    return step.step


STRATEGY = Strategy(
    plan=plan, options=Options, axes=(), formula=Formula("ddp"), library="torch",
    configs=("accelerate", "torchtitan"),
    problems=problems, syncs=(), saves="parameters", on_several_ranks="ddp",
    offloaded_by="fsdp2",
)
