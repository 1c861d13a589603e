"""FSDP1 (FullyShardedDataParallel): one flat parameter per unit, and one of the root for the
rest.

Forward gathers the root first and each block just before it runs. The host runs ahead until two
frees are pending, and then waits for the older one. The root stays gathered. In backward a block is
gathered when a gradient of its output arrives, or while the one after it runs (backward_prefetch).
It is freed and reduced once all its gradients are one.

The split into views, made with the all-gather of forward, is the first node of a block and so its
last in backward. A gather that forward prefetches makes that node before the running block. So in
backward it comes after that block too. A unit that runs again is gathered again in forward, with
views of its own, and once in backward. Frozen parameters are gathered and reduced with trained ones
of their unit; a unit of nothing else is never reduced. Observed on torch 2.13; see
torch/distributed/fsdp, and flat_parameter/hooks.py for the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Literal

from zsim.autograd.traced.model import TracedModel
from zsim.io.units import format_bytes
from zsim.ir.buffers import Buffer, form_of, gradient_of
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program, RankProgram
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.repeats import repeats
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NBYTES, Optimizer, Precision
from zsim.strategies.building import optimizers, torch_arguments
from zsim.strategies.building.backward_events import (
    Backwards,
    accumulated_after_sums,
    recomputed_in_turn,
)
from zsim.strategies.building.parameters import units_read
from zsim.strategies.building.step_builder import rank_program
from zsim.strategies.building.training import Training
from zsim.strategies.flat_parameter.construction import construction, lazy_init
from zsim.strategies.flat_parameter.flat_parameter import FlatParameter, flat_parameters
from zsim.strategies.flat_parameter.flat_parameter_step import EARLIER_STEP, FlatParameterStep
from zsim.strategies.flat_parameter.hooks import MicroBatchHooks, Order, Units
from zsim.strategies.flat_parameter.optimizer import optimizer
from zsim.strategies.flat_parameter.rank_share import RankShare
from zsim.strategies.flat_parameter.views import viewed
from zsim.strategies.fsdp.hook_events import traced_problems
from zsim.strategies.fsdp.passes import ORIGINAL
from zsim.strategies.fsdp.unsharded_gradients import UnshardedGradients
from zsim.strategies.strategy import Formula, OptionValue, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of FullyShardedDataParallel, with torch's defaults."""

    sharding: Literal["full", "grad_op"] = "full"
    """ "full" frees blocks after forward (FULL_SHARD; over replicas HYBRID_SHARD), "grad_op" after
    backward (SHARD_GRAD_OP)."""
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    """The block before is gathered before ("pre") or after ("post") a block's gradients are
    computed, or when its turn comes ("none")."""
    forward_prefetch: bool = False
    """The next block is gathered before a block runs, from the second step on."""
    limit_all_gathers: bool = True
    """The host waits while two frees are pending."""
    use_orig_params: bool = False
    """The optimizer steps the original parameters, which the flat one then aligns."""


def problems(options: Options, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """Refusals of a mesh, one line each, the scenario's key first."""
    if mesh.dp_shard == 1:
        yield (
            "strategy.dp_shard: expected at least 2, found 1: torch then shards nothing "
            "(NO_SHARD) and reduces nothing over replicas; "
            "use ddp"
        )


def memory_caveats(options: Options, model: ModelSpec, precision: Precision) -> Iterator[str]:
    """Bytes that the caching allocator may reserve beside those that are told, a line each."""
    if not options.limit_all_gathers:
        nbytes = model.num_parameters * DTYPE_NBYTES[precision.parameters]
        yield (
            "strategy.limit_all_gathers: a host that gathers a whole pass ahead keeps about "
            f"{format_bytes(nbytes)} more in blocks than is told, by record_stream, and fragments"
        )


def model_problems(
    options: Options, model: ModelSpec, accumulates: bool = False,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Iterator[str]:
    """Refusals of torch for `model`, and models beyond the simulation, the scenario's key first."""
    if model.nested and checkpointing.mode != "none" and not checkpointing.recompute:
        yield (
            "activation_checkpointing: expected no units in a block that fsdp1 recomputes, found "
            "wrapping.nested; use `recompute`, or leave one of them out"
        )
    yield from traced_problems(model)
    if isinstance(model, TracedModel):
        yield from _traced_problems(model)
    for unit in model.units:
        if len(unit.modules) > 1:
            yield (
                f"wrapping: {unit.fqn} has {len(unit.modules)} modules, but "
                f"FullyShardedDataParallel wraps one; "
                'use every = 1 or "all" with ends = "root", or fsdp2'
            )
            return
        if (
            not options.use_orig_params
            and not isinstance(model, TracedModel)  # a trace lacks what the option would mend
            and len({parameter.requires_grad for parameter in unit.parameters}) > 1
        ):
            yield (
                f"frozen: expected all parameters of {unit.fqn} frozen or all trained, found both; "
                'torch refuses that ("Must flatten tensors with uniform `requires_grad` when '
                '`use_orig_params=False`"); use strategy.use_orig_params = true, or freeze the '
                "whole unit"
            )
            return


def _traced_problems(model: TracedModel) -> Iterator[str]:
    """Refusals of traces that lack what views of one flat parameter would do."""
    if model.not_in_loss:
        yield (
            f"model.traced: the loss does not depend on {model.not_in_loss[0]}, and a trace lacks "
            "the gradient that FSDP1 makes for it; use fsdp2, or drop the parameter"
        )
    if model.partly_frozen:
        yield (
            f"frozen: {model.partly_frozen[0]} is frozen in part, and a trace lacks the gradients "
            "that FSDP1 makes for it; freeze whole units, or use fsdp2"
        )
    if model.autocast != "none":
        yield (
            "precision.autocast: a trace has casts in autocast's cache, which keeps none of "
            "views; use fsdp2, or trace it without"
        )
    if model.nested:
        yield (
            "model.traced: expected no units in units with fsdp1, of which a trace does not tell "
            "when each begins and ends; use fsdp2"
        )
    if repeats(model):
        yield (
            "model.traced: expected units that run once with fsdp1, which makes new views of its "
            "flat parameters for each run; use fsdp2"
        )


def num_distinct_ranks(model: ModelSpec, mesh: Mesh) -> int:
    """Most ranks with programs of their own: one for each end of a parameter in a flat one, and
    those between two ends, all alike."""
    return min(mesh.dp_shard, 2 * len(model.parameters) + 2)


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of every rank; ranks that step as many elements of each parameter share one."""
    flats = _flats(training, mesh=mesh, options=options)
    programs: dict[RankShare, int] = {}
    ranks: list[RankProgram] = []
    by_shard: list[int] = []
    both: dict[frozenset[str], tuple[FlatParameterStep, FlatParameterStep]] = {}
    for rank in range(mesh.dp_shard):
        held = RankShare.of(
            rank, training=training, flats=flats, original=options.use_orig_params
        )
        if held not in programs:
            if held.hollow not in both:
                both[held.hollow] = _both_steps(
                    training, flats, mesh=mesh, options=options, hollow=held.hollow
                )
            programs[held] = len(ranks)
            ranks.append(
                _rank(training, both[held.hollow], flats=flats, held=held, options=options)
            )
        by_shard.append(programs[held])
    return Program(mesh=mesh, ranks=tuple(ranks), assignment=tuple(by_shard) * mesh.dp_replicate)


def _flats(training: Training, *, mesh: Mesh, options: Options) -> dict[str, FlatParameter]:
    return flat_parameters(
        training.model,
        num_shards=mesh.dp_shard,
        dtype=training.precision.parameters,
        aligned=options.use_orig_params,
    )


def _rank(
    training: Training,
    both: tuple[FlatParameterStep, FlatParameterStep],
    *,
    flats: dict[str, FlatParameter],
    held: RankShare,
    options: Options,
) -> RankProgram:
    """The program of a rank that has `held` of the flat parameters."""
    numels = list(held.stepped)
    memory = optimizers.first_and_later(
        numels, optimizer=training.optimizer, dtype=ORIGINAL, device=training.device,
        owner="optimizer",
    )
    steps = []
    for passes, of_step, first in zip(both, memory, (True, False), strict=True):
        step = passes.copy()
        step.hang_gradients(dict(held.placeholders))
        steps.append(
            optimizer(step, numels, of_step, first=first, keeps_gradients=options.use_orig_params)
        )
    made = construction(list(flats.values()), training.model, kept=held.kept)
    return rank_program(made.ops, first=steps[0], steady=steps[1])


def _both_steps(
    training: Training, flats: dict[str, FlatParameter], *, mesh: Mesh, options: Options,
    hollow: frozenset[str],
) -> tuple[FlatParameterStep, FlatParameterStep]:
    """The passes of the first step, which learns the order of forward, and of later ones.

    Each step leaves gradients that only flat parameters hold, frees that the limiter has not waited
    for, and unsharded parameters. After a few steps it always leaves the same.
    """
    flats = {fqn: copy(flat) for fqn, flat in flats.items()}
    order, units = Order(), Units.of(training)
    first = steady = _new_step(training, mesh=mesh, options=options, hollow=hollow)
    _passes(first, flats, options, order=order, units=units, first=True)
    while True:
        before, left = (
            (len(steady.frees), _left(steady, flats, options)), _left(steady, flats, options),
        )
        steady = _new_step(training, mesh=mesh, options=options, hollow=hollow)
        steady.frees, steady.live = [EARLIER_STEP] * before[0], left
        steady.repeats = first.repeats
        _passes(steady, flats, options, order=order, units=units, first=False)
        if (len(steady.frees), _left(steady, flats, options)) == before:
            return first, steady


def _left(
    step: FlatParameterStep, flats: dict[str, FlatParameter], options: Options
) -> set[Buffer]:
    """Buffers that live on to the next step."""
    gradients = [gradient_of(fqn) for fqn in flats] if options.use_orig_params else []
    return step.live.intersection([*gradients, *(form_of(fqn, "unsharded") for fqn in flats)])


def _new_step(
    training: Training, *, mesh: Mesh, options: Options, hollow: frozenset[str]
) -> FlatParameterStep:
    element = DTYPE_NBYTES[training.precision.parameters]
    return FlatParameterStep(
        training=training,
        mesh=mesh,
        gradients=UnshardedGradients(
            of_views=True, element=element,
            nbytes={p.fqn: p.numel * element for p in viewed(training.model).parameters},
            backwards=Backwards(recomputed_in_turn, accumulated_after_sums(training)),
        ),
        reads=units_read(training.model),
        limits=options.limit_all_gathers,
        originals=options.use_orig_params,
        units=tuple([unit.fqn for unit in training.model.units]),
        hollow=hollow,
    )


def _passes(
    step: FlatParameterStep, flats: dict[str, FlatParameter], options: Options, *, order: Order,
    units: Units, first: bool,
) -> None:
    """The forwards and the backward of each micro-batch; the `first` step makes what is made once.
    """
    training = step.training
    for number in range(training.batch.accumulation):
        step.micro_batch = number
        sync = training.sync == "every" or number == training.batch.accumulation - 1
        if step.repeated(sync=sync):
            continue
        micro_batch = MicroBatchHooks(
            step=step,
            flats=flats,
            units=units,
            order=order,
            frees=options.sharding == "full",
            keeps_views=options.sharding == "grad_op" and options.use_orig_params,
            backward_prefetch=options.backward_prefetch,
            forward_prefetch=options.forward_prefetch,
            sync=sync,
        )
        step.begin("forward", micro_batch=number)
        if first and not number:
            lazy_init(step, list(flats.values()))
        for modules in training.forwards:
            micro_batch.forward(modules)
        step.begin("backward", micro_batch=number)
        micro_batch.backward()


FREED = OptionValue("sharding", "full", "blocks freed after forward")
STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_replicate", "dp_shard"),
    formula=Formula("zero3", keeps="float32 shards"), casts_input=True, hooks=1.0,
    library="fsdp1", configs=("accelerate",), steps_two_bytes=False,
    elsewhere=torch_arguments.OF_FSDP1,
    num_distinct_ranks=num_distinct_ranks, nests="units",
    differentiates=viewed,
    unit_hooks="fsdp1_views", problems=problems, model_problems=model_problems,
    memory_caveats=memory_caveats,
    over_all_ranks="fsdp1", saves_memory=(FREED,), frees_after_forward=(FREED,),
    keeps_gathered=(OptionValue("sharding", "grad_op"),),
    gathers_earlier=(
        OptionValue("forward_prefetch", True), OptionValue("backward_prefetch", "pre"),
        OptionValue("limit_all_gathers", False),
    ),
)
