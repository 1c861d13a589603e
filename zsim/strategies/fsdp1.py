"""fsdp1: what torch's FullyShardedDataParallel does, with one flat parameter per block and one of the rest, which is the root's.

Forward gathers the root first and each block just before it runs; the host may run ahead until two frees are pending, and then waits
for the older one. The root stays gathered. In backward a block is gathered when a gradient of its output arrives, or while the one
after it runs (backward_prefetch). Its gradients become one when all of them are there: the split into views, made with the all-gather of
forward, is the first node of a block and so its last in backward. A gather that forward prefetches makes that node before
the block that runs, so that in backward it comes after that block too. Observed on torch 2.13; see torch/distributed/fsdp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from zsim import optimizers
from zsim.errors import ScenarioError
from zsim.mesh import Mesh
from zsim.model import ROOT, ModelSpec
from zsim.program import Program, RankProgram
from zsim.strategies.building import accumulated_after_sums, rank_program, units_read
from zsim.strategies.flat_construction import construction, lazy_init
from zsim.strategies.flat_optimizer import optimizer
from zsim.strategies.flat_parameters import FlatParameter, flat_parameters, stepped
from zsim.strategies.flat_sharded import EARLIER_STEP, FlatShardedStep
from zsim.strategies.passes import ORIGINAL
from zsim.strategies.sharded_gradients import Gradients
from zsim.training import DTYPE_NBYTES, LoweredModule, Optimizer, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As FullyShardedDataParallel takes them, with torch's defaults.

    `sharding`: "full" frees blocks after forward (FULL_SHARD; over replicas HYBRID_SHARD), "grad_op" keeps them until backward
    (SHARD_GRAD_OP). `backward_prefetch`: the block before is gathered before ("pre") or after ("post") a block's gradients are
    computed, or when its turn comes. `forward_prefetch`: the next block is gathered before a block runs, from the second step on.
    `limit_all_gathers`: the host waits when two frees are pending. `use_orig_params`: the optimizer steps the original parameters,
    which the flat one then aligns, and not the flat ones.
    """

    sharding: Literal["full", "grad_op"] = "full"
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False


def problems(options: Options, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """What is not done on such a mesh, with the scenario's key in front."""
    if mesh.dp_shard == 1:
        yield (
            "strategy.dp_shard: expected at least 2, found 1: torch then shards nothing (NO_SHARD) and reduces nothing over replicas; "
            "use ddp"
        )


def model_problems(options: Options, model: ModelSpec, accumulates: bool) -> Iterator[str]:
    """What is not modelled of `model`, with the scenario's key in front."""
    if model.frozen:
        yield "frozen: not modelled with fsdp1; use fsdp2 or leave it out"
    if model.unused:
        yield "model.unused: not modelled with fsdp1; use fsdp2 or leave it out"
    if model.forwards > 1 or any(module.fqn != module.path for module in model.modules):
        yield "model.uses, batch.forwards: expected 1 with fsdp1, which is not modelled with more; use fsdp2"
    for unit in model.units:
        if len(unit.modules) > 1:
            yield (
                f"wrapping: {unit.fqn} has {len(unit.modules)} modules, but FullyShardedDataParallel wraps one; "
                'use every = 1 or "all" with ends = "root", or fsdp2'
            )
            return


def kinds(model: ModelSpec, mesh: Mesh) -> int:
    """At most a rank for each end of a parameter in a flat one, and those between two ends, all alike."""
    return min(mesh.dp_shard, 2 * len(model.parameters) + 2)


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Program of every rank; ranks that step as many elements of each parameter share one. ScenarioError for what is not modelled."""
    found = (*problems(options, mesh, training.optimizer), *model_problems(options, training.model, False))
    if training.precision.autocast != "none":
        found += ("precision.autocast: not modelled with fsdp1, whose views autocast does not cache; use fsdp2 or parameters = \"bf16\"",)
    if found:
        raise ScenarioError(found)
    flats = _flats(training, mesh=mesh, options=options)
    programs: dict[tuple[frozenset[str], tuple[int, ...], tuple[int, ...]], int] = {}
    ranks: list[RankProgram] = []
    by_shard: list[int] = []
    both: dict[frozenset[str], tuple[FlatShardedStep, FlatShardedStep]] = {}
    for rank in range(mesh.dp_shard):
        numels = stepped(training.model, flats, rank=rank, original=options.use_orig_params)
        kept = tuple([flat.layout.local(rank).numel for flat in flats.values()])
        hollow = frozenset([flat.fqn for flat in flats.values() if options.use_orig_params and not any(flat.held(rank))])
        alike = (hollow, kept, tuple(numels))
        if alike not in programs:
            if hollow not in both:
                both[hollow] = _both_steps(training, mesh=mesh, options=options, hollow=hollow)
            programs[alike] = len(ranks)
            ranks.append(_rank(training, both[hollow], flats=flats, numels=numels, kept=kept, options=options))
        by_shard.append(programs[alike])
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
    both: tuple[FlatShardedStep, FlatShardedStep],
    *,
    flats: dict[str, FlatParameter],
    numels: list[int],
    kept: tuple[int, ...],
    options: Options,
) -> RankProgram:
    """The program of a rank that keeps so many elements of each flat parameter, without padding, and steps `numels`."""
    memory = optimizers.first_and_later(
        numels, optimizer=training.optimizer, dtype=ORIGINAL, device=training.device, owner="optimizer"
    )
    steps = [
        optimizer(passes.copy(), numels, of_step, first=first, keeps_gradients=options.use_orig_params)
        for passes, of_step, first in zip(both, memory, (True, False), strict=True)
    ]
    made = construction(list(flats.values()), training.model, kept=kept)
    return rank_program(made.ops, first=steps[0], steady=steps[1])


def _both_steps(
    training: Training, *, mesh: Mesh, options: Options, hollow: frozenset[str] = frozenset()
) -> tuple[FlatShardedStep, FlatShardedStep]:
    """The passes of the first step, in which nothing is known of the order of forward, and of later ones.

    The limiter's queue outlives a step, and after a few each leaves as many frees in it as it finds.
    """
    first = _new_step(training, mesh=mesh, options=options, hollow=hollow)
    flats = _flats(training, mesh=mesh, options=options)
    _passes(first, flats, options, known=False)
    pending = len(first.frees)
    while True:
        steady = _new_step(training, mesh=mesh, options=options, hollow=hollow)
        steady.frees = [EARLIER_STEP] * pending
        if options.use_orig_params:
            steady.live = {f"{unit}.gradient" for unit in flats}
        _passes(steady, _flats(training, mesh=mesh, options=options), options, known=True)
        if len(steady.frees) <= pending:
            return first, steady
        pending = len(steady.frees)


def _new_step(training: Training, *, mesh: Mesh, options: Options, hollow: frozenset[str]) -> FlatShardedStep:
    element = DTYPE_NBYTES[training.precision.parameters]
    return FlatShardedStep(
        training=training,
        mesh=mesh,
        gradients=Gradients(
            nbytes={p.fqn: p.numel * element for p in training.model.parameters},
            after_sums=accumulated_after_sums(training),
        ),
        reads=units_read(training.model),
        limits=options.limit_all_gathers,
        units=tuple([unit.fqn for unit in training.model.units]),
        hollow=hollow,
    )


def _passes(step: FlatShardedStep, flats: dict[str, FlatParameter], options: Options, *, known: bool) -> None:
    """Forward and backward of each micro-batch; `known`: whether an earlier step has shown the order of forward."""
    training, wrapped_by = step.training, step.training.model.wrapped_by
    for micro_batch in range(training.batch.accumulation):
        step.micro_batch = micro_batch
        sync = training.sync == "every" or micro_batch == training.batch.accumulation - 1
        ahead = options.forward_prefetch and (known or micro_batch > 0)
        run = _Run(step, flats, options, sync=sync, looks_ahead=ahead, wrapped_by=wrapped_by)
        step.begin("forward", micro_batch=micro_batch)
        if not known and not micro_batch:
            lazy_init(step, list(flats.values()))
        run.forward()
        step.begin("backward", micro_batch=micro_batch)
        run.backward()


@dataclass(slots=True)
class _Run:
    """One micro-batch. `splits` are the views of flat parameters into their parts, in the order in which forward made them, each with
    the place of the first module that forward ran after it."""

    step: FlatShardedStep
    flats: dict[str, FlatParameter]
    options: Options
    sync: bool
    looks_ahead: bool
    wrapped_by: dict[str, str]
    """By module: its unit."""
    splits: list[tuple[FlatParameter, int]] = field(default_factory=list)
    order: list[FlatParameter] = field(default_factory=list)
    """The flat parameters in the order in which their forwards ended."""
    ahead: list[FlatParameter] = field(default_factory=list)
    """The flat parameters in the order in which forward gathers them."""

    @property
    def modules(self) -> tuple[LoweredModule, ...]:
        """In the order of forward."""
        return self.step.training.modules

    def _block(self, module: LoweredModule) -> FlatParameter | None:
        """The flat parameter of a module that is a unit of its own."""
        unit = self.wrapped_by[module.fqn]
        return self.flats.get(unit) if unit != ROOT else None

    def forward(self) -> None:
        """The root first, then each block just in time; with forward_prefetch, the one before gathers it."""
        step, root = self.step, self.flats.get(ROOT)
        blocks = [block for module in self.modules if (block := self._block(module)) is not None]
        self.ahead = [*([root] if root is not None else []), *blocks]
        for flat in self.flats.values():
            flat.awaits_forward, flat.prefetched = True, False
        step.begin_forward()
        step.cast_input(self.modules)
        if root is not None:
            self._pre_forward(root, 0)
        for place, module in enumerate(self.modules):
            block = self._block(module)
            if block is not None:
                self._pre_forward(block, place)
            step.forward(module, reads_input=place == 0)
            if block is not None:
                self._post_forward(block, free=self.options.sharding == "full")
        if root is not None:
            self._post_forward(root, free=False)

    def _pre_forward(self, flat: FlatParameter, place: int) -> None:
        step = self.step
        if not flat.prefetched:
            step.unshard(flat)
            self.splits.append((flat, place))
        flat.awaits_forward = False
        step.wait_for_unshard()
        following = self._following(flat) if self.looks_ahead else None
        if following is not None and following.awaits_forward and not following.prefetched:
            step.unshard(following)
            following.prefetched = True
            self.splits.append((following, place))

    def _following(self, flat: FlatParameter) -> FlatParameter | None:
        """The one that forward gathers after `flat`."""
        place = self.ahead.index(flat) + 1
        return self.ahead[place] if place < len(self.ahead) else None

    def _post_forward(self, flat: FlatParameter, *, free: bool) -> None:
        self.order.append(flat)
        self.step.reshard(flat, free=free)
        flat.awaits_backward = True

    def backward(self) -> None:
        """Each unit is gathered if need be, runs, and once the splits of the others that forward made after its own are over, reduces."""
        step, last = self.step, len(self.modules) - 1
        step.begin_backward()
        root = self.flats.get(ROOT)
        if root is not None:
            self._pre_backward(root)
        for back, module in enumerate(reversed(self.modules)):
            block = self._block(module)
            if block is not None:
                self._pre_backward(block)
            step.backward(module)
            while self.splits and self.splits[-1][1] >= last - back:
                self._post_backward(self.splits.pop()[0])
        step.end_backward(sync=self.sync)
        for flat in self.flats.values():
            flat.awaits_backward = flat.prefetched = False

    def _pre_backward(self, flat: FlatParameter) -> None:
        if not flat.prefetched:
            self.step.unshard(flat)
        self.step.wait_for_unshard()
        flat.awaits_backward = False
        if self.options.backward_prefetch == "pre":
            self._prefetch_before(flat)

    def _prefetch_before(self, flat: FlatParameter) -> None:
        """Gather the unit whose forward ended just before, unless it has begun backward already."""
        place = self.order.index(flat)
        before = self.order[place - 1] if place else None
        if before is not None and before.awaits_backward and not before.prefetched:
            self.step.unshard(before)
            before.prefetched = True

    def _post_backward(self, flat: FlatParameter) -> None:
        self.step.concatenate_gradients(flat)
        self.step.reshard(flat, free=self.sync or self.options.sharding == "full")
        if self.options.backward_prefetch == "post":
            self._prefetch_before(flat)
        if self.sync:
            self.step.reduce(flat)
        else:
            self.step.accumulate_without_sync(flat)
