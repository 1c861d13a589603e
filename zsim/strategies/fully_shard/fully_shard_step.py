"""FullyShardStep: a training step in the words of fully_shard's hooks (FSDPState, FSDPParamGroup).

Each hook issues its ops here; fsdp2.py says when it fires.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from zsim.autograd.lowered import LoweredModule
from zsim.ir.buffers import NOTHING, form_of
from zsim.ir.mesh import Mesh
from zsim.ir.ops import MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.backward_events import (
    Backwards,
    accumulated_after_sums,
    recomputed_in_turn,
)
from zsim.strategies.building.parameters import units_read, units_read_by_blocks
from zsim.strategies.building.training import Training
from zsim.strategies.fsdp.unsharded_gradients import UnshardedGradients
from zsim.strategies.fully_shard.param_group import FSDPParamGroup, ReshardPlan
from zsim.strategies.fully_shard.reduce import ReducingStep


@dataclass(slots=True, kw_only=True)
class FullyShardStep(ReducingStep):
    """One training step of one rank."""

    post_forward_order: list[FSDPParamGroup] = field(default_factory=list)
    """The groups in the order in which their forwards ended, one for each run."""
    recomputed_root: FSDPParamGroup | None = None
    """The unit that takes itself for the root, as it is called while its block is recomputed."""

    @classmethod
    def new(
        cls, training: Training, groups: dict[str, FSDPParamGroup], *, mesh: Mesh, offload: bool
    ) -> FullyShardStep:
        """A step without ops, in which the parameters live that `groups` still have unsharded."""
        model, element = training.model, DTYPE_NBYTES[training.precision.parameters]
        step = cls(
            training=training,
            mesh=mesh,
            gradients=UnshardedGradients(
                nbytes={p.fqn: p.numel * element for p in model.parameters},
                backwards=Backwards(recomputed_in_turn, accumulated_after_sums(training)),
            ),
            reads=units_read(model),
            block_reads=units_read_by_blocks(model) if model.nested else {},
            offload=offload,
        )
        for group in groups.values():
            if group.part:
                step.live.update([form_of(p.fqn, group.part) for p in group.parameters if p.shard])
            if group.unsharded:
                step.live.update(form_of(p.fqn, "unsharded") for p in group.parameters if p.padded)
        return step

    def copy(self) -> FullyShardStep:
        """This step so far, to be ended in another way."""
        return replace(self, ops=list(self.ops), parts=list(self.parts), live=set(self.live))

    def repeated(self, groups: Iterable[FSDPParamGroup], *, sync: bool) -> bool:
        """True where this micro-batch begins as one before, whose ops it then has."""
        state = (
            sync, self.over_replicas, frozenset(self.live), frozenset(self.on_host),
            *self.reshards.values(), *((each.unsharded, each.part) for each in groups),
        )
        by = self.repeat(self.micro_batch, state, self.waits, self.unfinished)
        before = len(self.ops) - 2 * by
        self.reduces += [event + by for event in self.reduces if event >= before]
        return by > 0

    def begin_forward(self, modules: tuple[LoweredModule, ...]) -> None:
        """The root's forward begins: all-gathers wait for the compute stream; inputs are cast."""
        self._gather_after_compute()
        self.cast_input(modules)

    def _gather_after_compute(self) -> None:
        last = next((op.index for op in reversed(self.ops) if op.stream == "compute"), None)
        self.gather_waits = [] if last is None else [last]
        self.last_copy_out = []

    def pre_forward(self, group: FSDPParamGroup) -> None:
        """Gather the group if need be, wait for it, and prefetch what is to follow it."""
        self.unshard(group)
        self.wait_for_unshard(group, forward=True)
        self.unshard_each(group.forward_prefetch)

    def post_forward(
        self, group: FSDPParamGroup, resharding: ReshardPlan, *, inputs: Sequence[MemoryEvent] = ()
    ) -> None:
        """Reshard the group if `resharding` says so, then free the `inputs` of its call; note it
        for prefetching in backward."""
        group.post_forward_indices.append(len(self.post_forward_order))
        self.post_forward_order.append(group)
        if resharding.frees(group):
            self.reshard(group, to=resharding.to, held=inputs)

    def end_forward(self, inputs: Sequence[MemoryEvent] = ()) -> None:
        """The root's forward is over: the last all-gather output is freed, then its `inputs`."""
        group, self.forward_gather = self.forward_gather, None
        self.gather_waits = self.last_copy_out or self.gather_waits
        if group is not None:
            memory, self.forward_output = [*self.drop(self.forward_output), *inputs], NOTHING
            self.issue(
                "free", group.fqn, stream="host", micro_batch=self.micro_batch, memory=memory
            )

    def leave_autocast(self) -> None:
        """The last forward before a backward is over: autocast's cache is emptied."""
        if self.training.freed_with_autocast_cache:
            self.issue(
                "free", ROOT, stream="host", micro_batch=self.micro_batch,
                memory=self.training.freed_with_autocast_cache,
            )

    def pre_backward(self, group: FSDPParamGroup) -> None:
        """Gather the group if need be, and prefetch: the units asked for, else the one whose
        forward ended before it (FSDPParamGroup._backward_prefetch)."""
        group.in_backward = True
        if group.state != "pre_backward":
            group.state = "pre_backward"
            self.unshard(group)
            self.wait_for_unshard(group, forward=False)
            if not group.backward_prefetch and group.post_forward_indices:
                index = group.post_forward_indices.pop()
                self.unshard_each(self.post_forward_order[:index][-1:])
        self.unshard_each(group.backward_prefetch)

    def recompute_hook(self, group: FSDPParamGroup, *, returns: bool) -> None:
        """A hook of a nested unit whose block is recomputed: before its forward, or after it.

        In its own backward the unit only needs its parameters. Before that, its call begins a
        forward, of which it takes itself for the root unless it lies in another such unit.
        """
        if returns:
            if self.recomputed_root is group:
                self.recomputed_root = None
                self.end_forward()
        elif group.in_backward:
            self.unshard(group)
            self.wait_for_unshard(group, forward=False)
        else:
            if self.recomputed_root is None:
                self.recomputed_root = group
                self._gather_after_compute()
                self.last_copy_out = self.gather_waits
            self.pre_forward(group)

    def post_backward(self, group: FSDPParamGroup, *, sync: bool) -> None:
        """Accumulate gradients, free the unsharded parameters, and with `sync` reduce."""
        group.state = "post_backward"
        self.add_accumulated(group)
        self.reshard(group)
        if not sync:
            self.accumulate_without_sync(group)
        elif self.has_gradients(group):
            self.reduce(group)
        else:
            self.drop_reduce_input(group)

    def end_backward(self, groups: Iterable[FSDPParamGroup], *, sync: bool) -> None:
        """The root's final callback: groups without a backward of their own end here."""
        for group in groups:
            if group.state != "post_backward":
                self.post_backward(group, sync=sync)
            group.state, group.in_backward = "idle", False
            group.post_forward_indices.clear()
            self._finalize_backward(group)
        self.post_forward_order = []
        self._end_reductions()
        self.release_loss()

    def _finalize_backward(self, group: FSDPParamGroup) -> None:
        """The compute stream waits for the reductions so far, and what they held of `group` goes.

        So does an all-gather that fully_shard prefetched and no unit used.
        """
        memory = self.drop(form_of(group.fqn, "reduced"))
        if group.gathered:
            group.gathered = False
            memory += self.drop(self.outputs.get(group.fqn, NOTHING))
            self.unfinished += [self.gathers[group.fqn]] if group.fqn in self.gathers else []
        if memory or self.unfinished:
            waits, self.unfinished = self.unfinished, []
            self.issue(
                "free", group.fqn, stream="compute", waits=waits, micro_batch=self.micro_batch,
                memory=memory,
            )

    def _end_reductions(self) -> None:
        """Free the last reduce-scatter's input; the next backward waits for nothing of this one."""
        self.gather_waits, self.last_copy_out, self.post_reduces = [], [], {}
        if self.reduce_input is not None:
            (buffer, event), self.reduce_input = self.reduce_input, None
            memory = self.drop(buffer)
            if memory:
                self.issue(
                    "free", ROOT, stream="compute", waits=(event,), micro_batch=self.micro_batch,
                    memory=memory,
                )
