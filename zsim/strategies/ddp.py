"""DDP: every rank keeps everything, gradients are all-reduced in buckets.

Construction checks the parameters' shapes (one all-gather, one broadcast) and broadcasts rank 0's
parameters. The first synchronised backward reduces one bucket of everything. Before the next
forward the buckets are rebuilt in the order in which gradients were ready (two small broadcasts).
Every later step runs like this.

With `find_unused_parameters` the buckets stay as they were made, in the reverse of the parameters'
order. Every backward ends with an all-reduce of one int32 per parameter, which says whether any
rank has used it. Observed on torch 2.13. Sources: torch/nn/parallel/distributed.py;
torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.autograd.traced.model import TracedModel
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Op
from zsim.ir.program import Program
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import ModelSpec, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import step_builder, torch_arguments
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.building.training import Training
from zsim.strategies.replicated import buckets as replicated_model
from zsim.strategies.replicated import construction
from zsim.strategies.replicated.buckets import Bucket, ReplicatedModel
from zsim.strategies.replicated.replicated_step import ReplicatedStep
from zsim.strategies.strategy import Formula, OptionValue, Strategy

MIB = 1 << 20
FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB = 1, 25
"""Caps in MiB when none is given: the first bucket is small so that communication begins early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of DistributedDataParallel, with torch's defaults."""

    bucket_cap_mb: float | None = None
    """DDP's bucket size in MiB; by default 1 for the first bucket, then 25."""
    gradient_as_bucket_view: bool = False
    """Gradients are views of DDP's buckets, and no copies."""
    find_unused_parameters: bool = False
    """DDP searches each forward's graph for parameters without gradient."""


def model_problems(
    options: Options, model: ModelSpec, accumulates: bool = False,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Iterator[str]:
    """Refusals of torch for `model`, one line each, the scenario's key first."""
    if model.left_out and not options.find_unused_parameters:
        key, cause, mend = _left_out(model)
        yield (
            f"{key}: DDP waits for a gradient of each parameter, and {cause} one: torch raises "
            f'"Expected to have finished reduction in the prior iteration" in the second forward; '
            f'{mend}, or use fsdp2'
        )
    if isinstance(model, TracedModel) and options.find_unused_parameters:
        yield (
            "strategy.find_unused_parameters: DDP then copies whatever the module returns, which "
            "a traced model does not tell; leave it "
            "out, and freeze what is not used"
        )


def _left_out(model: ModelSpec) -> tuple[str, str, str]:
    """Key, cause and remedy for a parameter that gets no gradient."""
    fqn = model.left_out[0].fqn
    if isinstance(model, TracedModel):
        return "model.traced", f"{fqn} never gets", "freeze it in the module"
    block = next(block for block in model.idle if fqn.startswith(f"{block}."))
    return (
        "model.unused", f"{block} never makes",
        f'use find_unused_parameters = true, freeze the block too, frozen = ["{block}.*"]',
    )


def buckets(training: Training, options: Options) -> tuple[Bucket, ...]:
    """The buckets of later steps, in the order in which they are reduced.

    DDP rebuilds them in the order in which gradients were ready. With `find_unused_parameters` it
    never does: they stay filled in the order of the parameters, and are reduced in reverse.
    """
    if options.find_unused_parameters:
        return _filled(replicated_model.reduced_parameters(training.model), training, options)[::-1]
    return _filled(replicated_model.ready_order(training), training, options)


def _filled(parameters: Bucket, training: Training, options: Options) -> tuple[Bucket, ...]:
    """`parameters` in buckets, in their order; a bucket closes once it has reached its cap."""
    caps = (
        [FIRST_BUCKET_CAP_MB, BUCKET_CAP_MB]
        if options.bucket_cap_mb is None
        else [options.bucket_cap_mb]
    )
    limits = [int(cap * MIB) for cap in caps]
    closed: list[Bucket] = []
    bucket: list[Parameter] = []
    nbytes = 0
    for parameter in parameters:
        bucket.append(parameter)
        nbytes += parameter.numel * DTYPE_NBYTES[training.precision.parameters]
        if nbytes >= limits[min(len(closed), len(limits) - 1)]:
            closed.append(tuple(bucket))
            bucket, nbytes = [], 0
    return (*closed, tuple(bucket)) if bucket else tuple(closed)


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of one step on the axis dp_replicate; a mesh of one rank communicates nothing."""
    model = under_ddp(training, mesh=mesh, options=options)
    owned = tuple(parameter.numel for parameter in model.trained)
    first, steady = both_steps(model)
    return step_builder.spmd(
        mesh,
        construction=construction.construction(model, has_master=model.has_master),
        second=rebuilding(first),
        first=_ended(first, owned, first=True),
        steady=_ended(steady, owned, first=False),
    )


def under_ddp(training: Training, *, mesh: Mesh, options: Options) -> ReplicatedModel:
    """The model of a training under DDP on the axis dp_replicate of `mesh`."""
    return ReplicatedModel(
        training=training,
        rebuilt=buckets(training, options),
        finds_unused=options.find_unused_parameters,
        num_replicas=mesh.size(replicated_model.AXIS),
        views=options.gradient_as_bucket_view,
    )


def _ended(step: ReplicatedStep, owned: tuple[int, ...], *, first: bool) -> StepBuilder:
    step.optimizer(owned, first=first, has_master=step.model.has_master)
    step.zero_grad()
    return step.step


def rebuilding(first: ReplicatedStep) -> tuple[Op, ...]:
    """Ops that begin the second step: its first forward rebuilds the buckets, unless the `first`
    step has."""
    if not first.has_reduced:
        return ()
    second = ReplicatedStep(first.model, buckets=first.buckets)
    second.rebuild_buckets()
    return tuple(second.step.ops)


def both_steps(model: ReplicatedModel) -> tuple[ReplicatedStep, ReplicatedStep]:
    """The passes of the first step and of later ones. They begin alike: a micro-batch that is not
    synchronised knows no buckets."""
    training = model.training
    last = training.batch.accumulation - 1
    alike = 0 if training.sync == "every" else last
    steady = ReplicatedStep(model, buckets=model.rebuilt)
    forward_backward(steady, range(alike), synchronises=False)
    first = steady.copy()
    if not model.finds_unused:
        first.begin_in_one_bucket()
    for step in (first, steady):
        forward_backward(step, range(alike, last + 1), synchronises=True)
    return first, steady


def forward_backward(step: ReplicatedStep, micro_batches: range, *, synchronises: bool) -> None:
    """Every one of `micro_batches`; a bucket is reduced once all its gradients are ready, and
    copied back at the end."""
    training = step.model.training
    for step.micro_batch in micro_batches:
        if step.repeated(synchronises=synchronises):
            continue
        step.step.begin("forward", micro_batch=step.micro_batch)
        if step.has_reduced:
            step.rebuild_buckets()
        if (
            training.sync == "every" or step.micro_batch == 0
        ):  # not after a forward whose gradients are not synchronised
            step.broadcast_buffers()
        for module in training.modules:
            step.forward(module)
        step.step.begin("backward", micro_batch=step.micro_batch)
        for module in training.backward_modules:
            step.backward(module, synchronises=synchronises)
            if synchronises:
                step.reduce_ready_buckets(module)
        if synchronises:
            step.copy_back()


STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_replicate",), formula=Formula("ddp"),
    library="ddp", configs=("accelerate", "deepspeed", "torchtitan"),
    elsewhere=torch_arguments.OF_DDP,
    model_problems=model_problems, shards_more="zero1", bucket_cap="bucket_cap_mb",
    saves="parameters",
    saves_memory=(OptionValue("gradient_as_bucket_view", True),),
    for_left_out=(OptionValue("find_unused_parameters", True),),
)
