"""Memory events of each module's forward and backward, as eager autograd makes them.

A liveness simulation over the calls of `zsim.autograd.aten.operator_calls`. It counts references to
storages as torch does. Python holds a value until its last use, and a module's input until the
module returns. Autograd holds what it saved until the node has run backward. The engine holds
gradients (`zsim.autograd.gradients`). The tape knows no strategy and no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field

from zsim.autograd.aten.call import Call
from zsim.autograd.backward_node import differentiate
from zsim.autograd.checkpoint_regions import OperatorCalls, Region
from zsim.autograd.gradients import Gradients
from zsim.autograd.host_copies import Crossings, InputsOnHost, SavedOnHost
from zsim.autograd.lowered import NO_COPIES, HostCopies, Recomputed, storage_events
from zsim.autograd.recomputation import recompute
from zsim.autograd.storages import Storages
from zsim.autograd.values import Values, dead_after, last_uses
from zsim.ir.buffers import buffer_of, sum_of_losses
from zsim.ir.ops import Free, MemoryEvent
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NBYTES, Batch, SavedTensorsHook

SEED = buffer_of("loss", "seed")


@dataclass(slots=True)
class Tape:
    """The state of one forward and backward over the whole model; `in_place`: the engine adds a
    gradient into another that nothing else holds."""

    in_place: InitVar[bool] = True
    values: Values = field(init=False)
    saving: InitVar[SavedTensorsHook | None] = None
    hook: SavedOnHost | InputsOnHost | None = field(init=False)
    """The hook that takes saved tensors to host memory."""
    framed: frozenset[str] = frozenset()
    """Values of the running module that only an operator's drop frees, not their last use."""

    def __post_init__(self, in_place: bool, saving: SavedTensorsHook | None) -> None:
        storages, nbytes = Storages(), dict[str, int]()
        gradients = Gradients(storages=storages, nbytes=nbytes, in_place=in_place)
        self.values = Values(gradients=gradients, storages=storages, nbytes=nbytes)
        self.hook = None
        if saving is not None:
            kind = SavedOnHost if saving.tensors == "saved_tensors" else InputsOnHost
            self.hook = kind(Crossings(self.values, saving.pinned))

    def know_parameters(self, model: ModelSpec, *, dtype: str, casts_once: bool = False) -> None:
        """Learn the parameters that several operators use, and the bytes of their gradients.

        `casts_once`: all linears with the same weight read one copy of it, whose cast gives the
        parameter one gradient.
        """
        self.values.gradients.in_sequences = "tokens" in model.first_operator.inputs
        operators = [op for module in model.modules for op in module.operators]
        through_casts = {
            fqn
            for op in operators
            if casts_once and op.kind == "linear"
            for fqn in (op.weight, op.bias)
        }
        directly = [op for op in operators if not (casts_once and op.kind == "linear")]
        used = Counter(
            [
                *(fqn for op in directly for fqn in (op.weight, op.bias) if fqn),
                *filter(None, through_casts),
            ]
        )
        for parameter in model.parameters:
            if used[parameter.fqn] > 1:
                self.values.gradients.tie(
                    parameter.fqn, uses=used[parameter.fqn],
                    nbytes=parameter.numel * DTYPE_NBYTES[dtype],
                )

    def run_forward(
        self, steps: list[OperatorCalls], *, entry: str, later: frozenset[str] = frozenset(),
        over: Iterable[OperatorCalls] = (),
    ) -> None:
        """Run the `steps` of a module, whose input is `entry`.

        Values inside an operator go when it returns, its inputs after their last use. The caller
        holds `entry` until the module returns. Values that other parts of the block read `later`
        stay. A checkpointed region saves its inputs and nothing else. If these steps are the last
        of the module, `over` are all its steps, which release what only they keep.
        """
        stays = later | self.framed
        last_use = last_uses(steps)
        for step in steps:
            self._run(step)
            dropped = {entry, *(value for call in step.calls for value in call.drops)}
            for value in dead_after(step, last_use):
                if value in self.values.nbytes and value not in dropped and value not in stays:
                    self.values.storages.release(value)
        for step in over:
            self._release_kept(step)
        if entry in self.values.nbytes and entry not in stays:
            self.values.storages.release(entry)

    def _run(self, step: OperatorCalls) -> None:
        """Run the calls of one operator."""
        hook = self.hook
        if step.region is not None and step.region.first is step:
            if hook is None:
                self.values.hold(step.region.inputs)
            else:
                hook.pack_inputs(step.region)
        pack = hook.pack_call if isinstance(hook, SavedOnHost) else None
        for call in step.calls:
            if not call.from_cache:
                self.values.make(call, saving=step.region is None, keeping=step.cached, pack=pack)
                self.values.drop(call)
        if step.cached:
            self.values.hold((step.kept.output,))

    def _release_kept(self, step: OperatorCalls) -> None:
        """Release what a checkpoint kept of a step that no backward recomputes."""
        if step.cached and step.region is None:
            self.values.storages.release(step.kept.output)
            for name, _ in step.kept.keeps:
                self.values.storages.release(name)

    def take_copies(self) -> HostCopies:
        """The copies of saved tensors since the last time."""
        return NO_COPIES if self.hook is None else self.hook.take()

    def let_go(self, steps: list[OperatorCalls]) -> tuple[Free, ...]:
        """Autocast ends and empties its cache: the copies made in `steps` that nothing else holds.
        """
        for call in (call for step in steps for call in step.calls):
            if call.cached and not call.from_cache:
                self.values.storages.release(call.output)
        return tuple(event for event in self.values.storages.take() if isinstance(event, Free))

    def cast_input(self, model: ModelSpec, name: str, *, batch: Batch, dtype: str) -> None:
        """The model's floating-point input in `dtype`; Python's references go when the first module
        returns, and when the root does."""
        tokens = batch.micro_batch * batch.sequence_length
        self.values.nbytes[name] = tokens * model.first_operator.in_features * DTYPE_NBYTES[dtype]
        self.values.storages.allocate(name, self.values.nbytes[name])
        self.values.storages.hold(name)

    def end_forward(self, entry: str) -> None:
        """The root returns, and lets go of `entry`, the model's input, if that was cast."""
        if entry in self.values.nbytes:
            self.values.storages.release(entry)

    def sum_losses(self, losses: list[str]) -> tuple[MemoryEvent, ...]:
        """Add the last of `losses` to the sum of those before it; nothing for the first. Returns
        these events apart."""
        if len(losses) > 1:
            self.values.storages.allocate(
                sum_of_losses(losses[-1], len(losses)), self.values.nbytes[losses[-1]]
            )
            self.values.storages.release(losses[-1])
            self.values.storages.release(sum_of_losses(losses[-2], len(losses) - 1))
        return tuple(storage_events(self.values.storages.take()))

    def seed(self, losses: list[str]) -> None:
        """The gradient that backward begins with: the caller's until it returns, and that of every
        loss in the sum."""
        self.values.storages.allocate(SEED, self.values.nbytes[losses[-1]], temporary=True)
        for loss in losses:
            self.values.storages.hold(SEED)
            self.values.gradients.waiting[loss] = SEED

    def run_backward(self, steps: list[OperatorCalls], *, bound: str = "") -> list[Region]:
        """Run every call in reverse; returns the regions that were recomputed, in that order.

        A region is recomputed when the first of its calls asks for something saved. The gradient of
        `bound`, the input of a nested unit, waits until the unit passes it on.
        """
        recomputed, self.values.gradients.bound = list[Region](), bound
        for step in reversed(steps):
            for call in reversed(step.calls):
                if call.from_cache or not self.values.wants(call.output):
                    continue
                if step.region is not None:
                    if self._differentiate_in(step.region, call):
                        recomputed.append(step.region)
                elif isinstance(self.hook, SavedOnHost):
                    saved = self.hook.unpacked(call)
                    differentiate(self.values, call, saved, unpacked=True)
                else:
                    differentiate(self.values, call, call)
        return recomputed

    def _differentiate_in(self, region: Region, call: Call) -> bool:
        """Backward of a `call` in a checkpointed region; whether it recomputes the region."""
        again = region.renamed(call)
        if again is region.last:
            self.values.gradients.flatten(call)
            inputs = self.hook.unpack_inputs(region) if self.hook is not None else ()
            recompute(self.values, region, unpacked=inputs)
            if region.kernels:
                self.values.storages.events.append(Recomputed())
        over = (*region.inputs, *region.unreached) if again is region.earliest else ()
        if self.hook is not None:  # the host's copies went when they were unpacked
            over = tuple(value for value in over if value not in region.packed)
        differentiate(self.values, call, again, unpacked=True, over=over)
        return again is region.last
