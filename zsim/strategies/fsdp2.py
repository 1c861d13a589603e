"""FSDP2 (fully_shard): one param group per block, or per list of modules, and one for the root.

The root gathers first, and each group just before the first of its modules runs. On a device the
host runs ahead, so the next all-gather starts while a block computes. In backward each group
prefetches the one before it, frees itself and reduces its gradients. Groups whose inputs need no
gradient, and the root, reduce at the very end, the root first. Frozen parameters ride the
all-gather, not the reduce-scatter; a unit that forward skips is never gathered.

`forward` and `backward` are the algorithm: hooks, in the order of fsdp/hook_events.py;
fully_shard/fully_shard_step.py has each of them. Source: torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from zsim.autograd.lowered import LoweredModule
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Op
from zsim.ir.program import Program, RankProgram
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.repeats import repeats
from zsim.models.spec import ROOT, ModelSpec
from zsim.models.training_options import Optimizer
from zsim.strategies.building import torch_arguments
from zsim.strategies.building.step_builder import rank_program
from zsim.strategies.building.training import Training
from zsim.strategies.fsdp.hook_events import (
    HookEvents,
    ModuleRun,
    PostBackward,
    PostForward,
    PreBackward,
    PreForward,
    hook_events,
    traced_problems,
)
from zsim.strategies.fully_shard.construction import DerivedMesh, construction
from zsim.strategies.fully_shard.fully_shard_step import FullyShardStep
from zsim.strategies.fully_shard.optimizer import memory_of, step_shards
from zsim.strategies.fully_shard.param_group import (
    FSDPParamGroup,
    ReshardPlan,
    first_of_each_kind,
    local_numels,
    sharded_groups,
)
from zsim.strategies.strategy import Formula, OptionValue, Strategy

AllReduceAfter = Literal["every", "last"]
"""The micro-batches after which gradients are reduced over replicas too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of fully_shard, with torch's defaults."""

    reshard_after_forward: Literal["auto"] | bool | int = "auto"
    """fully_shard's own: "auto" frees blocks and not the root; a number reshards to so many
    ranks."""
    forward_prefetch: int = 0
    """Next blocks that each block gathers when it begins (set_modules_to_forward_prefetch)."""
    backward_prefetch: int = 0
    """Blocks before it that each block gathers in backward (set_modules_to_backward_prefetch); 0
    for torch's default, the one before it, also of the root."""
    offload: bool = False
    """Sharded parameters, gradients and optimizer states live in host memory, where the optimizer
    steps (CPUOffloadPolicy)."""

    @property
    def all_reduce_after(self) -> AllReduceAfter:
        """The micro-batches that are reduced over replicas, where there are any."""
        return "every"

    def __post_init__(self) -> None:
        # to one rank is not at all, as torch has it; and Python's 1 equals True, which is all ranks
        if self.reshard_after_forward == 1 and self.reshard_after_forward is not True:
            object.__setattr__(self, "reshard_after_forward", False)


def problems(options: Options, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """Refusals of torch, one line each, the scenario's key first."""
    if (optimizer.name, optimizer.implementation) == ("sgd", "fused"):
        yield (
            "optimizer.implementation: torch 2.13 has no fused SGD for sharded parameters; use "
            "foreach or for-loop"
        )
    resharding = options.reshard_after_forward
    if (
        isinstance(resharding, int)
        and not isinstance(resharding, bool)
        and (resharding < 1 or mesh.dp_shard % resharding)
    ):
        yield (
            f"strategy.reshard_after_forward: expected a divisor of dp_shard = {mesh.dp_shard}, "
            f"found {resharding}"
        )


def model_problems(
    options: Options, model: ModelSpec, accumulates: bool = False,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Iterator[str]:
    """Refusals of torch for `model`, one line each, the scenario's key first."""
    yield from traced_problems(model)
    if model.unused and accumulates:
        yield (
            "model.unused: torch 2.13 raises AttributeError (_unsharded_param) there where "
            'sync = "last" keeps gradients in another reduce dtype; use sync = "every", or '
            "one dtype"
        )
    recomputed = checkpointing.applies_to(model) if checkpointing.save and model.nested else ()
    for block in sorted(recomputed):
        early = _recomputed_early(model, block, options)
        if early:
            yield (
                "activation_checkpointing.save: expected nested units recomputed in their own "
                f"backward, found {', '.join(early)}; torch 2.13 fails there "
                '("profiler._record_function_enter_new … encountered during backward but not '
                'found in storage"); use mode = "full", or other wrapping.nested units'
            )
            return


def _recomputed_early(model: ModelSpec, block: str, options: Options) -> list[str]:
    """The nested units of `block` whose hooks call more in its recomputation than in forward.

    Recomputed before its own backward, a unit takes itself for the root, which records more steps
    for the profiler. A last unit, before nothing but a sum, is in its backward by then and records
    fewer. That makes up for one other unit, unless a run finds it gathered already. Source:
    torch/utils/checkpoint.py, _CachedTorchDispatchMode, which counts calls by operator.
    """
    parts = [part for part in model.modules if part.within == block and part.fqn == part.path]
    working = [part for part in parts if any(op.kind != "residual" for op in part.operators)]
    early = [part.fqn for part in working[:-1] if part.inside]
    if working and not working[-1].inside:
        return early
    keeps = not ReshardPlan.of(options.reshard_after_forward, num_shards=0).blocks
    gathered = repeats(model) and (keeps or options.forward_prefetch)
    return early if gathered or len(early) > 1 else []


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of every rank; ranks whose shards are alike share one."""
    passes = RankIndependentPasses.of(training, mesh=mesh, options=options)
    both = (passes.first, passes.steady)
    ranks: list[RankProgram] = []
    assignment: list[int] = []
    starts = first_of_each_kind(training.model, num_shards=mesh.dp_shard)
    for shard, stop in zip(starts, [*starts[1:], mesh.dp_shard], strict=True):
        assignment += [len(ranks)] * (stop - shard)
        numels = local_numels(training.model, num_shards=mesh.dp_shard, rank=shard)
        first, steady = (
            step_shards(step.copy(), numels, memory)
            for step, memory in zip(both, memory_of(training, numels), strict=True)
        )
        ranks.append(rank_program(passes.construction, first=first, steady=steady))
    return Program(mesh=mesh, ranks=tuple(ranks), assignment=tuple(assignment) * mesh.dp_replicate)


def forward(
    step: FullyShardStep, modules: tuple[LoweredModule, ...], groups: dict[str, FSDPParamGroup],
    events: HookEvents, resharding: ReshardPlan,
) -> None:
    """Each unit is gathered before its first module and resharded after its last, the root around
    all of them."""
    step.begin_forward(modules)
    for event in events.forward(modules):
        match event:
            case PreForward(unit):
                step.pre_forward(groups[unit])
            case ModuleRun(module, returns):
                inputs = step.forward(module, holds=returns and bool(resharding.to))
            case PostForward(unit, at_root=False):
                step.post_forward(groups[unit], resharding, inputs=inputs)
            case PostForward(unit):
                step.post_forward(groups[unit], resharding)
    step.end_forward(inputs)
    step.make_loss(modules)


def backward(
    step: FullyShardStep, groups: dict[str, FSDPParamGroup], events: HookEvents, *, sync: bool
) -> None:
    """Each unit is gathered, prefetches the one before it, runs, is freed, and with `sync` reduces.

    A unit that runs twice does all of this twice, and reduces what autograd has accumulated by
    then. A unit without a backward of its own (the root, and where the input needs no gradient)
    ends last. Where a block is recomputed, the hooks of its nested units fire once more.
    """
    step.begin_backward()
    for event in events.backward():
        match event:
            case PreBackward(unit):
                step.pre_backward(groups[unit])
            case ModuleRun(module):
                step.backward(module, hook=lambda call: step.recompute_hook(
                    groups[call.unit], returns=call.returns
                ))
            case PostBackward(unit, module):
                step.post_backward(groups[unit], sync=sync)
                step.after_hook(module)
    step.end_backward(groups.values(), sync=sync)


class RankIndependentPasses(NamedTuple):
    """The ops that all ranks issue alike: shards are padded to equal sizes, and only the optimizer
    steps a rank's own elements."""

    construction: tuple[Op, ...]
    first: FullyShardStep
    steady: FullyShardStep

    @classmethod
    def of(cls, training: Training, *, mesh: Mesh, options: Options) -> RankIndependentPasses:
        """Construction, and forward and backward of the first step and of later ones, which may
        find unsharded parameters that the first has left."""
        groups = sharded_groups(training.model, num_shards=mesh.dp_shard)
        _set_prefetch(training.model, groups, options)
        resharding = ReshardPlan.of(options.reshard_after_forward, num_shards=mesh.dp_shard)
        built = construction(
            groups,
            [unit.fqn for unit in training.model.inside_out],
            derived=DerivedMesh(training=training, mesh=mesh, resharded_to=resharding.to),
            offloaded=options.offload and training.device != "cpu",
        )

        def passes() -> FullyShardStep:
            step = FullyShardStep.new(training, groups, mesh=mesh, offload=options.offload)
            _run_micro_batches(step, groups, resharding, all_reduce=options.all_reduce_after)
            return step

        first = passes()
        leaves_parameters = any(group.part or group.unsharded for group in groups.values())
        return cls(tuple(built.ops), first, passes() if leaves_parameters else first)


def _set_prefetch(model: ModelSpec, groups: dict[str, FSDPParamGroup], options: Options) -> None:
    """Give each unit but the root those that it gathers ahead, in forward and in backward."""
    units = dict.fromkeys(model.wrapped_by.values())
    order = [groups[unit] for unit in units if unit in groups and unit != ROOT]
    for index, group in enumerate(order):
        group.forward_prefetch = tuple(order[index + 1 :][: options.forward_prefetch])
        group.backward_prefetch = tuple(order[:index][::-1][: options.backward_prefetch])


def _run_micro_batches(
    step: FullyShardStep, groups: dict[str, FSDPParamGroup], resharding: ReshardPlan, *,
    all_reduce: AllReduceAfter,
) -> None:
    """The forwards and the backward of each micro-batch."""
    training, events = step.training, hook_events(step.training, groups)
    for step.micro_batch in range(training.batch.accumulation):
        last = step.micro_batch == training.batch.accumulation - 1
        sync = last or training.sync == "every"
        step.over_replicas = last or all_reduce == "every" or step.mesh.dp_replicate == 1
        if step.repeated(groups.values(), sync=sync):
            continue
        step.begin("forward", micro_batch=step.micro_batch)
        for modules in training.forwards:
            forward(step, modules, groups, events, resharding)
        step.leave_autocast()
        step.begin("backward", micro_batch=step.micro_batch)
        backward(step, groups, events, sync=sync)


def num_distinct_ranks(model: ModelSpec, mesh: Mesh) -> int:
    """The number of ranks whose shards differ."""
    return len(first_of_each_kind(model, num_shards=mesh.dp_shard))


def offloads(options: Options) -> bool:
    """CPUOffloadPolicy is set."""
    return options.offload


FREED = OptionValue("reshard_after_forward", True)
STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_shard",),
    formula=Formula("zero3", keeps="float32 shards"), casts_input=True, hooks=1.0,
    elsewhere=torch_arguments.OF_FULLY_SHARD,
    library="fully_shard", configs=("accelerate", "fully_shard", "torchtitan"),
    dtensors=True, saves="parameters",
    num_distinct_ranks=num_distinct_ranks, nests="units",
    unit_hooks="fully_shard",
    problems=problems, model_problems=model_problems,
    offload_option="offload", offloads=offloads,
    saves_memory=(
        FREED, OptionValue("offload", True, "states and the optimizer's step go to the host")
    ),
    keeps_gathered=(OptionValue("reshard_after_forward", False),),
    frees_after_forward=(FREED, OptionValue("reshard_after_forward", "auto")),
    prefetch_depths=("forward_prefetch", "backward_prefetch"),
)
