"""fsdp2: what torch's `fully_shard` does with one param group per block, or per list of modules,
and one for the root.

The root gathers first, and each group just before the first of its modules runs; on a device the
host runs ahead, so the next all-gather starts while a block computes. In backward each group
prefetches the one before it, frees itself and reduces its gradients; groups whose inputs need no
gradient, and the root, reduce at the very end, the root first. Frozen parameters ride the
all-gather, not the reduce-scatter; a unit that forward passes by is never gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zsim.autograd.lowered import InnerCall, LoweredModule
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Op
from zsim.ir.program import Program, RankProgram
from zsim.ir.sharding import shard_size
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import ROOT, RUN, ModelSpec
from zsim.models.training_options import DTYPE_NBYTES, Optimizer
from zsim.strategies.building.backward_events import accumulated_after_sums
from zsim.strategies.building.parameters import units_read, units_read_by_blocks
from zsim.strategies.building.step import rank_program
from zsim.strategies.building.training import Training
from zsim.strategies.fsdp.unsharded_gradients import UnshardedGradients
from zsim.strategies.fully_shard.construction import DerivedMesh, construction
from zsim.strategies.fully_shard.hook_calls import RECORD, HookCalls, watched
from zsim.strategies.fully_shard.optimizer import memory_of, step_shards
from zsim.strategies.fully_shard.param_group import Group, local_numels, sharded_groups
from zsim.strategies.fully_shard.step import ShardedStep
from zsim.strategies.strategy import Formula, OptionValue, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`reshard_after_forward` as fully_shard takes it: "auto" (blocks yes, root no), true, false,
    or a number of ranks.

    `forward_prefetch`: how many of the next blocks each block gathers when it begins
    (set_modules_to_forward_prefetch; 0: none, torch's default). `backward_prefetch`: how many of
    the blocks before it each block gathers in backward (set_modules_to_backward_prefetch; 0:
    torch's default, the one before it, which also holds for the root). `offload`: sharded
    parameters, their gradients and optimizer states live in host memory, where the optimizer steps
    (CPUOffloadPolicy).
    """

    reshard_after_forward: Literal["auto"] | bool | int = "auto"
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    offload: bool = False


def problems(options: Options, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """What torch refuses, one line each, with the scenario's key in front."""
    if (optimizer.name, optimizer.implementation) == ("sgd", "fused"):
        yield (
            "optimizer.implementation: torch 2.13 has no fused SGD for sharded parameters; use "
            "foreach or for-loop"
        )
    asked = options.reshard_after_forward
    if (
        isinstance(asked, int)
        and not isinstance(asked, bool)
        and (asked < 1 or mesh.dp_shard % asked)
    ):
        yield (
            f"strategy.reshard_after_forward: expected a divisor of dp_shard = {mesh.dp_shard}, "
            f"found {asked}"
        )


def model_problems(
    options: Options, model: ModelSpec, accumulates: bool = False,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Iterator[str]:
    """What torch cannot do where `model` has units that forward passes by, with the scenario's key
    in front."""
    if model.unused and accumulates:
        yield (
            "model.unused: torch 2.13 looks for the gradient of a block that never ran "
            "(AttributeError: _unsharded_param) where "
            'sync = "last" keeps gradients in another reduce dtype; use sync = "every" or one '
            'dtype for both'
        )


When = Literal["every", "last"]


def plan(
    training: Training, *, mesh: Mesh, options: Options, all_reduce: When = "every"
) -> Program:
    """The Program of every rank; ranks whose shards are alike share one.

    `all_reduce`: after which micro-batches gradients are reduced over replicas too, where there are
    any.
    """
    keep = _ranks_kept(options, mesh)
    programs: list[RankProgram] = []
    by_shard: list[int] = []
    starts = _first_of_alike(training.model, mesh.dp_shard)
    same = _Same.on_every_rank(
        training, mesh=mesh, keep=keep, options=options, all_reduce=all_reduce
    )
    for shard, stop in zip(starts, [*starts[1:], mesh.dp_shard], strict=True):
        by_shard += [len(programs)] * (stop - shard)
        numels = local_numels(training.model, num_shards=mesh.dp_shard, rank=shard)
        passes = zip((same.first, same.steady), memory_of(training, numels), strict=True)
        first, steady = (step_shards(step.copy(), numels, memory) for step, memory in passes)
        programs.append(rank_program(same.construction, first=first, steady=steady))
    return Program(mesh=mesh, ranks=tuple(programs), assignment=tuple(by_shard) * mesh.dp_replicate)


def num_distinct_ranks(model: ModelSpec, mesh: Mesh) -> int:
    """How many ranks differ in their shards."""
    return len(_first_of_alike(model, mesh.dp_shard))


def _first_of_alike(model: ModelSpec, num_shards: int) -> list[int]:
    """The first of each run of ranks whose shards are alike: full ones, for each size of dim 0 a
    last partial one, empty ones."""
    starts = {0}
    for rows in {parameter.shape[0] for parameter in model.parameters if parameter.shape[0]}:
        full = rows // shard_size(rows, num_shards)
        starts |= {full, full + 1} if rows % shard_size(rows, num_shards) else {full}
    return sorted(start for start in starts if start < num_shards)


@dataclass(frozen=True, slots=True)
class Keep:
    """What forward leaves: `blocks` and `root` say whether they are resharded, `to` over how many
    ranks (0 for all)."""

    blocks: bool
    root: bool
    to: int = 0


def _ranks_kept(options: Options, mesh: Mesh) -> Keep:
    """fully_shard's reading of reshard_after_forward: 1 rank is False, all ranks is True, an int
    holds for the root too."""
    value = options.reshard_after_forward
    if value == "auto":
        return Keep(blocks=True, root=False)
    if isinstance(value, bool):
        return Keep(blocks=value, root=value)
    if value in (1, mesh.dp_shard):
        return Keep(blocks=value != 1, root=value != 1)
    return Keep(blocks=True, root=True, to=value)


@dataclass(frozen=True, slots=True)
class _Same:
    """What every rank does alike: shards are padded to equal sizes, and only the optimizer steps
    what of them is a rank's own."""

    construction: tuple[Op, ...]
    first: ShardedStep
    steady: ShardedStep

    @classmethod
    def on_every_rank(
        cls, training: Training, *, mesh: Mesh, keep: Keep, options: Options, all_reduce: When
    ) -> _Same:
        """Construction, and the forward and backward of the first step and of later ones, which may
        find what the first has left."""
        groups = sharded_groups(training.model, num_shards=mesh.dp_shard)
        built = construction(
            groups,
            [unit.fqn for unit in training.model.inside_out],
            derived=DerivedMesh(training=training, mesh=mesh, resharded_to=keep.to),
            offloaded=options.offload and training.device != "cpu",
        )
        first = _passes(
            training, mesh=mesh, groups=groups, keep=keep, options=options, all_reduce=all_reduce
        )
        steady = first
        if any(group.part or group.unsharded for group in groups.values()):
            steady = _passes(
                training, mesh=mesh, groups=groups, keep=keep, options=options,
                all_reduce=all_reduce,
            )
        return cls(tuple(built.ops), first, steady)


def _passes(
    training: Training, *, mesh: Mesh, groups: dict[str, Group], keep: Keep, options: Options,
    all_reduce: When,
) -> ShardedStep:
    """The forward and backward passes of one step, the same in every step."""
    element = DTYPE_NBYTES[training.precision.parameters]
    gradients = UnshardedGradients(
        nbytes={p.fqn: p.numel * element for p in training.model.parameters},
        after_sums=accumulated_after_sums(training),
    )
    model = training.model
    step = ShardedStep(
        training=training,
        mesh=mesh,
        gradients=gradients,
        reads=units_read(model),
        block_reads=units_read_by_blocks(model) if model.nested else {},
        offload=options.offload,
    )
    step.live.update(
        f"{p.fqn}.{group.part}"
        for group in groups.values()
        if group.part
        for p in group.parameters
        if p.shard
    )
    step.live.update(
        f"{p.fqn}.unsharded"
        for group in groups.values()
        if group.unsharded
        for p in group.parameters
        if p.padded
    )
    for micro_batch in range(training.batch.accumulation):
        step.micro_batch = micro_batch
        last = micro_batch == training.batch.accumulation - 1
        sync = last or training.sync == "every"
        step.over_replicas = last or all_reduce == "every" or mesh.dp_replicate == 1
        order: list[Group] = []
        step.calls = HookCalls(watched=watched(training))
        step.begin("forward", micro_batch=micro_batch)
        for modules in training.forwards:
            order += forward(step, modules, groups, keep, ahead=options.forward_prefetch)
        step.leave_autocast()
        step.begin("backward", micro_batch=micro_batch)
        again = options.forward_prefetch
        backward(
            step, training.backward_modules, groups, order, sync=sync,
            ahead=options.backward_prefetch, ahead_again=again,
        )
    return step


def forward(
    step: ShardedStep, modules: tuple[LoweredModule, ...], groups: dict[str, Group], keep: Keep, *,
    ahead: int = 0,
) -> list[Group]:
    """Root first, then each group just in time, or `ahead` of it.

    A group is gathered before the first of its modules and resharded after the last, the root's at
    the end, and after it those groups that still wait for a module which forward passes by, the
    last one first. Returns the groups in the order in which their forwards ended, one that ran
    twice twice.
    """
    root = groups.get(ROOT)
    order: list[Group] = []
    step.begin_forward()
    step.cast_input(modules)
    wrapped_by = step.training.model.wrapped_by
    blocks = _blocks(wrapped_by, groups)
    first, last = _ends(step)
    if root is not None:
        step.unshard(root)
        step.wait_for_unshard(root, forward=True)
    for module in modules:
        group = groups.get(wrapped_by[module.fqn])
        step.calls.enter(module.fqn)
        if group is not None and group is not root and module.fqn in first:
            step.call(group, _following(group, blocks, ahead))
        ends = group is not None and group is not root and module.fqn in last
        returns = ends or module is modules[-1]
        held = step.forward(
            module, reads_input=module is modules[0], holds=returns and bool(keep.to)
        )
        if group is not None and ends:
            order.append(group)
            step.calls.count(RECORD)
            if keep.blocks:
                step.reshard(group, to=keep.to, held=held)
    if root is not None:
        order.append(root)
        if keep.root:
            step.reshard(root, to=keep.to)
    for group in _incomplete(step, groups):
        order.append(group)
        if keep.blocks:
            step.reshard(group, to=keep.to)
    step.end_forward(held)
    step.sum_losses(modules[-1])
    return order


def backward(
    step: ShardedStep,
    modules: tuple[LoweredModule, ...],
    groups: dict[str, Group],
    order: list[Group],
    *,
    sync: bool,
    ahead: int = 0,
    ahead_again: int = 0,
) -> None:
    """Reverse order; each group gathers if need be, prefetches those before it, runs, frees itself,
    and reduces.

    A group that ran twice does so twice, but autograd adds its gradients up and keeps them only
    after the last time: before, there is nothing to reduce, unless earlier micro-batches have left
    something. One that has no backward of its own (the root, and where the input needs no gradient)
    enters once, and stays unsharded to the end. Groups before the first trained parameter have no
    backward at all, but are prefetched all the same: that gather is let go at the end. `modules`
    come in the order of backward, `order` is that of forward. A unit in a block that is recomputed
    is called again then: what it gathers, and prefetches `ahead_again`, stays for its own backward.
    """
    step.begin_backward()
    wrapped_by = step.training.model.wrapped_by
    blocks, wholes = (
        _blocks(wrapped_by, groups),
        {module.fqn: module.whole for module in step.training.model.modules},
    )
    reverse = blocks[::-1]
    first, last = _ends(step)
    ends = {forward[-1].fqn for forward in step.training.forwards}
    places: dict[str, list[int]] = {fqn: [] for fqn in groups}
    for place, group in enumerate(order):
        places[group.fqn].append(place)
    returned: list[Group] = []

    def hook(call: InnerCall) -> None:
        group = groups[call.unit]
        if call.returns:
            step.return_again(group)
        else:
            step.call_again(group, _following(group, blocks, ahead_again))

    for module in modules:
        own = groups.get(wrapped_by[module.fqn])
        if own is not None and (own.fqn == ROOT or module.fqn in last):
            returned.insert(0, own)
        # a block that returns what a unit in it made has the later hook on it
        while returned and not module.returns_inner_output:
            entered = returned.pop(0)
            explicit = _following(entered, reverse, ahead) if entered.fqn != ROOT else []
            _pre_backward(step, entered, order, places[entered.fqn], explicit=explicit)
        for group in _incomplete(step, groups) if module.fqn in ends else []:
            _pre_backward(
                step, group, order, places[group.fqn], explicit=_following(group, reverse, ahead)
            )
        step.calls.again()
        step.backward(module, hook=hook)
        step.calls.require_found(wholes[module.fqn])
        if (
            own is not None
            and own.fqn != ROOT
            and module.fqn in first
            and module.input_needs_gradient
        ):
            post_backward(step, own, sync=sync)
        step.pass_on(module)
    for group in groups.values():
        if group.state != "post_backward":
            post_backward(step, group, sync=sync)
        group.state, group.in_backward = "idle", False
        step.finalize_backward(group)
    step.end_backward()


def _pre_backward(
    step: ShardedStep, group: Group, order: list[Group], places: list[int], *, explicit: list[Group]
) -> None:
    """Gather the group if need be, and prefetch `explicit` ones or, where there are none, the one
    before it in `order`.

    `places` are the group's own in `order`; the last one is used up.
    """
    group.in_backward = True
    if group.state != "pre_backward":
        group.state = "pre_backward"
        step.unshard(group)
        step.wait_for_unshard(group, forward=False)
        if not explicit and places:
            step.unshard_each(order[: places.pop()][-1:])
    step.unshard_each(explicit)


def _blocks(wrapped_by: dict[str, str], groups: dict[str, Group]) -> list[Group]:
    """The groups but for the root's, in the order of forward."""
    return [
        groups[unit]
        for unit in dict.fromkeys(wrapped_by.values())
        if unit in groups and unit != ROOT
    ]


def _incomplete(step: ShardedStep, groups: dict[str, Group]) -> list[Group]:
    """The groups that end with the root's forward, as forward passes some of their modules by; as
    torch lists them, in reverse."""
    waiting = step.training.model.waits_for_idle
    return [group for fqn, group in reversed(groups.items()) if fqn in waiting]


def _ends(step: ShardedStep) -> tuple[set[str], set[str]]:
    """Every run of the first module of each group, and of the last.

    Groups that wait for a module that never runs begin once in each forward, and have no last.
    """
    wrapped_by, waiting = step.training.model.wrapped_by, step.training.model.waits_for_idle
    path = {fqn: fqn.partition(RUN)[0] for fqn in wrapped_by}
    once = [fqn for fqn in wrapped_by if fqn == path[fqn] and wrapped_by[fqn] not in waiting]
    first = {wrapped_by[fqn]: fqn for fqn in reversed(once)}
    last = {wrapped_by[fqn]: fqn for fqn in once}
    begin, end = (
        {fqn for fqn, group in wrapped_by.items() if path[fqn] == of.get(group)}
        for of in (first, last)
    )
    for modules in step.training.forwards if waiting else ():
        runs = {wrapped_by[module.fqn]: module.fqn for module in modules[::-1]}
        begin |= {fqn for group, fqn in runs.items() if group in waiting}
    return begin, end


def _following(group: Group, order: list[Group], ahead: int) -> list[Group]:
    """The next `ahead` groups after `group`."""
    place = order.index(group) + 1 if ahead else 0
    return order[place : place + ahead]


def post_backward(step: ShardedStep, group: Group, *, sync: bool) -> None:
    """Accumulate, free the unsharded parameters, and with `sync` reduce what gradients there are.
    """
    group.state = "post_backward"
    step.add_accumulated(group)
    step.reshard(group)
    if not sync:
        step.accumulate_without_sync(group)
    elif step.has_gradients(group):
        step.reduce(group)
    else:
        step.drop_reduce_input(group)


def offloads(options: Options) -> bool:
    """CPUOffloadPolicy is set."""
    return options.offload


STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_shard",),
    formula=Formula("zero3", keeps="float32 shards"), casts_input=True, hooks=True,
    num_distinct_ranks=num_distinct_ranks, nests="units", unit_hooks="fully_shard",
    problems=problems, model_problems=model_problems, offloads=offloads,
    saves_memory=(
        OptionValue("reshard_after_forward", True),
        OptionValue("offload", True, "states and the optimizer's step go to the host"),
    ),
    prefetch_depths=("forward_prefetch", "backward_prefetch"),
)
