"""ZeRO-3: parameters, gradients and optimizer states are all sharded; a unit is gathered only
around its compute.

Forward: gather, compute, free. Backward: gather, compute, free, reduce-scatter. `lookahead` gathers
that many modules ahead of the one that computes. A group that several modules read stays gathered
from its first to its last reader of a pass: the root's, tied weights, buckets across units.
Parameters without a gradient are sharded in flat buffers of their own. These are gathered wherever
a module reads them, in backward for the gradient of its input, and never reduced or stepped.
Source: Rajbhandari et al., arXiv 1910.02054, §5.3.

Hybrid: small parameters, or those of small units, stay whole, as ZeRO-2 has them. They are never
gathered for compute. Their gradients are reduce-scattered, and stepped shards all-gathered. With a
threshold that takes in all of them the Program is ZeRO-2's. DeepSpeed has such a threshold for
parameters (stage3_param_persistence_threshold), and gathers all of those in one call.

Replicas of shards are as in zero1.py: this is MiCS, whose all-gathers stay in a group. ZeRO++'s hpZ
(arXiv 2306.10209) shards states over all ranks, and gathers in a node for backward alone. That is
fsdp2 with a number of ranks as its `reshard_after_forward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from zsim.autograd.lowered import LoweredModule
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Optimizer
from zsim.strategies import zero1
from zsim.strategies.building.training import Training
from zsim.strategies.flat_buffer import host_buffers
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
from zsim.strategies.strategy import Formula, OptionValue, Strategy

MAX_LOOKAHEAD = 256
"""Modules gathered ahead: each module looks at all of them."""
MOST_ELEMENTS = 10**12
"""Largest threshold: more than any model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of ZeRO-3: its gathers, its flat buffers, and what stays whole."""

    lookahead: int = 1
    """Modules that are gathered ahead."""
    granularity: Granularity = "unit"
    """A flat buffer for each "unit" or "parameter", or buckets of a size, as "25 MiB"."""
    persistence_threshold: int = field(default=0, metadata={"most": MOST_ELEMENTS})
    """Parameters of at most so many elements stay whole."""
    zero2_threshold: int = field(default=0, metadata={"most": MOST_ELEMENTS})
    """Units of at most so many elements are ZeRO-2's: parameters stay whole."""

    @property
    def grouping(self) -> Grouping:
        """The rule of the flat buffers, and of what stays whole."""
        return Grouping(
            granularity=self.granularity, persistence_threshold=self.persistence_threshold,
            zero2_threshold=self.zero2_threshold,
        )


def problems(options: Options, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """Refusals of options, one line each, the scenario's key first."""
    if options.lookahead > MAX_LOOKAHEAD:
        yield (
            f"strategy.lookahead: expected at most {MAX_LOOKAHEAD}, found {options.lookahead}; "
            f"with so many ahead nothing is sharded"
        )


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of one step; where one rank is a group there is nothing to shard and it is
    ZeRO-1's."""
    model = FlatModel.cut(training, mesh=mesh, grouping=options.grouping)
    if model.num_shards == 1:
        return zero1.plan_cut(model, mesh=mesh)
    step, modules = step_class(model)(model, sharded=True), training.modules
    for step.micro_batch in range(training.batch.accumulation):
        step.step.begin("forward", micro_batch=step.micro_batch)
        forward(step, modules, lookahead=options.lookahead)
        step.step.begin("backward", micro_batch=step.micro_batch)
        backward(step, training.backward_modules, lookahead=options.lookahead)
    return zero1.program(step, mesh=mesh)


def forward(step: FlatBufferStep, modules: tuple[LoweredModule, ...], *, lookahead: int) -> None:
    """Gather, compute and free, module by module."""
    done = _last_users(step.model, modules)
    for i, module in enumerate(modules):
        step.unshard(*_needed(step.model, modules[i : i + 1 + lookahead]))
        step.forward(module)
        step.reshard(*done[module.fqn])


def backward(step: FlatBufferStep, modules: tuple[LoweredModule, ...], *, lookahead: int) -> None:
    """Gather, compute, free and reduce-scatter what is whole; `modules` come in the order of
    backward."""
    done, ready = _last_users(step.model, modules), step.model.last_users(modules)
    for i, module in enumerate(modules):
        step.unshard(*_needed(step.model, modules[i : i + 1 + lookahead]))
        step.backward(module)
        step.reshard(*done[module.fqn])
        for group in [group for group in ready[module.fqn] if group.trained]:
            zero1.finish_gradient(step, group, FlatBufferStep.reduce_scatter_gradients)
    step.release_loss()


def _last_users(
    model: FlatModel, modules: tuple[LoweredModule, ...]
) -> dict[str, tuple[FlatGroup, ...]]:
    """Sharded groups that no later module of the same round needs, by module.

    A round ends where a module would run again that ran in it already, unless it runs several times
    in a row.
    """
    paths = {module.fqn: module.path for module in model.training.model.modules}
    rounds: list[list[LoweredModule]] = [[]]
    known: set[str] = set()
    for module in modules:
        path = paths[module.fqn]
        if path in known and path != paths[rounds[-1][-1].fqn]:
            rounds.append([])
            known = set()
        rounds[-1].append(module)
        known.add(path)
    last = [model.last_users(turn) for turn in rounds]
    return {
        module.fqn: _sharded(users[module.fqn])
        for turn, users in zip(rounds, last, strict=True)
        for module in turn
    }


def _needed(model: FlatModel, modules: tuple[LoweredModule, ...]) -> tuple[FlatGroup, ...]:
    """The sharded groups that `modules` read, in the order in which they are needed."""
    return _sharded(
        dict.fromkeys(group for module in modules for group in model.needs[module.fqn])
    )


def _sharded(groups: Iterable[FlatGroup]) -> tuple[FlatGroup, ...]:
    return tuple([group for group in groups if not group.whole])


def num_whole(options: Options, model: ModelSpec) -> int:
    """Elements of the parameters that stay whole."""
    return sum([parameter.numel for parameter in options.grouping.kept_whole(model)])


STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_replicate", "dp_shard"), formula=Formula("zero3"),
    library="zsim", configs=("deepspeed",), nests="buffers",
    offloadable=("optimizer", "parameters"),
    pinned=host_buffers.pinned,
    on_drives=("optimizer", "parameters"),
    drive_nbytes=host_buffers.drive_nbytes,
    saves="buffers", flat_buffers=saved_buffers, num_whole=num_whole,
    num_groups=num_groups, problems=problems, over_all_ranks="zero3",
    prefetch_depths=("lookahead",),
    saves_memory=(
        OptionValue("persistence_threshold", 0, "small parameters are sharded too"),
        OptionValue("zero2_threshold", 0, "small units are sharded too"),
    ),
)
