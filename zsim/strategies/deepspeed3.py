"""DeepSpeed's ZeRO-3: parameters are sharded each by itself, gathered by the modules that need
them, and ahead by a recorded trace.

Each linear, norm or other module that owns parameters gathers them at once before it is called, and
releases them after. The first forward and backward gather module by module, and record their order.
Later ones follow that trace: a module gathers what is missing, then more ahead, until too much is
whole (coordinator.py). Blocks and the root own nothing, and gather ahead as well. Gradients are
reduce-scattered bucket by bucket within backward, and a rank's shards of them stay from step to
step. With `zero_quantized_gradients` they are reduced in int4 by all-to-alls
(quantized_gradients.py). The step releases everything, and gathers small parameters that persist.
With `leaf_module`, or with `stage3_module_granularity_threshold`, a block does so for all modules
inside.

Frozen parameters are sharded, gathered and kept as all others. A module whose output needs no
gradient has no backward, and one that a recomputation gathers frozen ones for releases them.

A module out of the recorded order has DeepSpeed drop the trace. The step that records anew gathers
nothing ahead, and the next one broadcasts six lists of integers first. With `trace = "breaks"` each
forward begins with another block than the one before. Source: deepspeed/runtime/zero/stage3.py of
DeepSpeed 0.19; Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zsim.autograd.lowered import InnerCall
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program, RankProgram
from zsim.ir.sharding import shard_size
from zsim.models.called_modules import called_inside
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Offload, Precision
from zsim.strategies.building.step_builder import StepBuilder, rank_program
from zsim.strategies.building.training import Training
from zsim.strategies.deepspeed_engine import config_keys
from zsim.strategies.deepspeed_engine import options as engine_options
from zsim.strategies.deepspeed_engine.options import ShardOptions
from zsim.strategies.deepspeed_engine.shards.construction import construction
from zsim.strategies.deepspeed_engine.shards.coordinator import Coordinator
from zsim.strategies.deepspeed_engine.shards.ends import optimizer_step
from zsim.strategies.deepspeed_engine.shards.module_calls import (
    Called,
    ModuleCall,
    Returned,
    module_calls,
)
from zsim.strategies.deepspeed_engine.shards.offload.offloaded_step import (
    OffloadedShardedStep,
    pinned,
)
from zsim.strategies.deepspeed_engine.shards.offload.swapping_step import SwappingShardedStep
from zsim.strategies.deepspeed_engine.shards.parameters import (
    ShardedParameters,
    drive_nbytes,
    drive_problems,
    files_on_drives,
    kept_in_memory,
    misread,
    sub_group_starts,
    write_buffer,
)
from zsim.strategies.deepspeed_engine.shards.step import ShardedStep
from zsim.strategies.strategy import Formula, Strategy

Options = ShardOptions
KINDS: Mapping[str | None, type[ShardedStep]] = {
    None: ShardedStep, "cpu": OffloadedShardedStep, "nvme": SwappingShardedStep,
}
"""Steps by the place of the optimizer's states."""


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of every rank. The second step follows the trace as all later ones do; a trace
    that breaks is recorded in every other forward."""
    sharded = ShardedParameters.of(training, mesh=mesh, options=options)
    kind = KINDS[training.offload.optimizer]
    first = kind.of(sharded)
    coordinator = Coordinator(
        sharded.own, {parameter.fqn for parameter in sharded.persistent}, options, first,
        sharded.leaves,
    )
    calls, breaks = module_calls(training), options.trace == "breaks"
    if breaks:
        blocks = engine_options.blocks(training.model)
        coordinator.first_block = next(
            call.module for call in calls if isinstance(call, Called) and call.module in blocks
        )
        coordinator.turned = engine_options.turned(training.model)
    forward_backward(first, coordinator, calls, first=True)
    optimizer_step(first, coordinator, first=True)
    steady = kind.of(sharded)
    steady.follow(first)
    coordinator.carrier = steady
    forward_backward(steady, coordinator, calls, first=breaks)
    optimizer_step(steady, coordinator, first=False)
    built = tuple(construction(sharded).ops)
    kind_of_rank = list(map(first.kind_of, range(mesh.dp_shard)))
    kinds = {each: number for number, each in enumerate(dict.fromkeys(kind_of_rank))}
    assignment = tuple(kinds[each] for each in kind_of_rank)
    ranks: list[RankProgram] = [
        rank_program(
            built, second=steady.asserts.ops,
            first=StepBuilder(first.of_rank(rank), list(first.step.parts)),
            steady=StepBuilder(steady.of_rank(rank), list(steady.step.parts)),
        )
        for rank in map(assignment.index, kinds.values())
    ]
    return Program(mesh=mesh, ranks=tuple(ranks), assignment=assignment)


def forward_backward(
    step: ShardedStep, coordinator: Coordinator, calls: Sequence[ModuleCall], *, first: bool
) -> None:
    """Every micro-batch: a module fetches before it computes and releases after, twice; a module
    that is recomputed does so as in forward."""

    inside, around = list[str](), called_inside(step.training.model)

    def again(call: InnerCall) -> None:
        if not call.returns:
            entered = [*around[call.unit], call.unit]
            for module in entered:
                if module not in inside:
                    coordinator.fetch(module, again=True)
            inside[:] = entered
        else:
            step.hold(call.unit)
            coordinator.release(call.unit)

    training = step.training
    for step.micro_batch in range(training.batch.accumulation):
        step.step.begin("forward", micro_batch=step.micro_batch)
        step.begin(coordinator, first=first)
        for call in calls:
            match call:
                case Called(module):
                    coordinator.fetch(module)
                case Returned(module):
                    coordinator.release(module)
                    step.let_go()
                case _:
                    step.forward(call)
        step.step.begin("backward", micro_batch=step.micro_batch)
        step.open_backward()
        for call in reversed(calls):
            match call:
                case Returned(module):
                    if call.differentiates:
                        coordinator.fetch(module, backward=True)
                case Called(module):
                    step.reduce_leaf(module)
                    if call.differentiates and call.input_needs_gradient:
                        coordinator.release(module, backward=True)
                    step.pass_on(call)
                case _:
                    inside.clear()
                    step.backward(call, reduces=True, again=again)
        step.end_backward()
        coordinator.release_leftovers()


def num_distinct_ranks(model: ModelSpec, mesh: Mesh) -> int:
    """Number of ranks with distinct shards, at most. Each parameter has whole shards, then a part
    of one, then empty ones."""
    begins = {0}
    for numel in {parameter.numel for parameter in model.parameters}:
        whole, rest = divmod(numel, shard_size(numel, mesh.dp_shard))
        begins |= {whole, whole + (rest > 0)}
    return sum(begin < mesh.dp_shard for begin in begins)


def stepped(options: Options, numels: Sequence[int], num_shards: int) -> Sequence[int]:
    """The first parameter of each sub-group."""
    shards = [shard_size(numel, num_shards) for numel in numels]
    return sub_group_starts(shards, most=options.sub_group_size)


def drive_caveats(
    offload: Offload, options: Options, model: ModelSpec, mesh: Mesh, precision: Precision
) -> Iterator[str]:
    """Missing sub-groups, the buffer to write parameters, the first gradient that DeepSpeed fails
    to read, and alternating steps."""
    if options.trace == "breaks":
        yield (
            "deepspeed3: with an odd batch.accumulation every other step records, and the steady "
            "one breaks; breaks inside blocks (MoE) are mended by leaf_module = \"blocks\""
        )
    if in_memory := kept_in_memory(offload, options, model, mesh):
        yield f"deepspeed3: {in_memory}"
    if buffer := write_buffer(offload, options, model, mesh, precision):
        yield f"deepspeed3: {buffer}"
    if fqn := misread(offload, options, model, mesh):
        yield (
            f"deepspeed3: the gradient of {fqn} is read to no multiple of 512 bytes, which fails "
            "unseen: DeepSpeed trains with another; take sub_group_size = 1, or shards of "
            "multiples of 128 elements"
        )


def num_groups(options: Options, model: ModelSpec) -> int:
    """Parameters, which are gathered and reduced one by one at most."""
    return len(model.parameters)


STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_shard",), formula=Formula("zero3"),
    library="deepspeed", configs=("deepspeed",), wraps_optimizer=True,
    problems=engine_options.shard_problems, model_problems=engine_options.shard_model_problems,
    precision_problems=engine_options.precision_problems,
    node_problems=engine_options.node_problems,
    steps_two_bytes=False, masters_of_cast=True, hooks=engine_options.HOOKS,
    syncs=("every",), sums_losses=False,
    elsewhere=config_keys.OF_SHARDS, num_distinct_ranks=num_distinct_ranks,
    num_groups=num_groups, saves="engine", stepped=stepped,
    offloadable=("optimizer", "parameters"), offloads_shards_alone=True, pinned=pinned,
    nests="modules", leaf_blocks=engine_options.leaf_blocks,
    on_drives=("optimizer", "parameters"), drive_nbytes=drive_nbytes,
    drive_problems=drive_problems, drive_caveats=drive_caveats, files_on_drives=files_on_drives,
)
