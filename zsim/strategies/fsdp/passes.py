"""Forward and backward of the modules of a step whose parameters torch shards, whichever of its two
FSDPs does it.

What a rank has alive is known by name; gradients of parameters are born unsharded. Nothing here
gathers, reduces or decides an order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from zsim.autograd.lowered import (
    NOTHING,
    InnerCall,
    LoweredModule,
    TapeEvent,
    storage_events,
)
from zsim.autograd.lowering.lower_model import loss_buffers
from zsim.autograd.traced.model import TracedModel
from zsim.ir.buffers import Buffer, owner_of
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, MemoryKind, OpKind
from zsim.models.spec import ROOT, is_model_input
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.backward_events import until_loss_goes
from zsim.strategies.building.kernels import accumulate_kernel
from zsim.strategies.building.step_builder import StepBuilder, alloc_of, free_of
from zsim.strategies.building.training import Training
from zsim.strategies.fsdp.unsharded_gradients import UnshardedGradients

ORIGINAL = "float32"
"""The dtype of FSDP1's sharded parameters, their gradients and optimizer states."""


def makes_model_input(event: TapeEvent) -> bool:
    """True where `event` makes an input of the model's own, cast by the root."""
    return isinstance(event, Alloc) and is_model_input(event.buffer)


@dataclass(slots=True, kw_only=True)
class Passes(StepBuilder):
    """The passes of one training step of one rank, and what of it is alive."""

    training: Training
    mesh: Mesh
    gradients: UnshardedGradients
    reads: dict[str, tuple[str, ...]]
    """Groups whose parameters a module reads; by module."""
    block_reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Groups that a block in parts reads itself, and recomputes with any part; by part."""
    micro_batch: int = 0
    reads_cast_input: LoweredModule | None = None
    """The first module of this forward, whose inputs the root has cast."""
    live: set[Buffer] = field(default_factory=set)
    waits: list[int] = field(default_factory=list)
    """Waits of the next module besides the ops before it on the compute stream."""
    loss: list[MemoryEvent] = field(default_factory=list)
    """The frees of the loss and its gradient, held back to the end of backward."""
    adding: dict[tuple[str, tuple[str, ...]], tuple[Kernel, ...]] = field(default_factory=dict)
    """Backward kernels with additions to gradients of earlier micro-batches, by module and
    parameters."""

    def nbytes(self, numel: int, dtype: str) -> int:
        """Bytes of `numel` elements."""
        return numel * DTYPE_NBYTES[dtype]

    def alloc(self, buffer: Buffer, kind: MemoryKind, nbytes: int) -> list[MemoryEvent]:
        """The allocation of a buffer, nothing for an empty one."""
        if not nbytes:
            return []
        self.live.add(buffer)
        return [alloc_of(buffer, kind, nbytes)]

    def alloc_each(
        self, buffers: Iterable[tuple[Buffer, int]], kind: MemoryKind
    ) -> list[MemoryEvent]:
        """The allocations of buffers by name and size, nothing for empty ones."""
        made = [alloc_of(name, kind, nbytes) for name, nbytes in buffers if nbytes]
        self.live.update([event.buffer for event in made])
        return [*made]

    def drop(self, buffer: Buffer) -> list[MemoryEvent]:
        """The freeing of a buffer if it lives."""
        if buffer not in self.live:
            return []
        self.live.remove(buffer)
        return [free_of(buffer)]

    def drop_each(self, buffers: Iterable[Buffer]) -> list[MemoryEvent]:
        """The freeing of those of different buffers that live."""
        live = self.live
        gone = [name for name in buffers if name in live]
        live.difference_update(gone)
        return [free_of(name) for name in gone]

    def forward(self, module: LoweredModule, *, holds: bool = False) -> Sequence[MemoryEvent]:
        """The forward of a module, without the casts that `cast_input` has made.

        A module's call holds its inputs until its hooks have run. With `holds` the frees of these
        inputs are left out, and returned.
        """
        memory = module.forward.events
        if module is self.reads_cast_input:
            memory = tuple([event for event in memory if not makes_model_input(event)])
        end = len(memory)
        while (
            holds
            and end
            and isinstance(last := memory[end - 1], Free)
            and self._is_input(last.buffer, module)
        ):
            end -= 1
        memory, held = memory[:end], memory[end:]
        if module.forward == NOTHING:  # of a block that does nothing before or after a unit in it
            return held
        self.waits += self.save_inputs(
            module.unit, module.forward.copies, micro_batch=self.micro_batch
        )
        self._compute("forward", module, kernels=module.forward.kernels, memory=memory)
        self.copy_saved(module.unit, module.forward.copies, micro_batch=self.micro_batch)
        return held

    def _is_input(self, buffer: str, module: LoweredModule) -> bool:
        """True where the caller of `module` frees `buffer`; for a family's last part only the
        model's inputs."""
        if isinstance(self.training.model, TracedModel):
            return buffer in module.caller_frees
        if module.unit == ROOT:
            return is_model_input(buffer)
        return (
            buffer == module.input_buffer
            if module.input_buffer
            else owner_of(buffer) != module.fqn
        )

    def cast_input(self, modules: tuple[LoweredModule, ...]) -> None:
        """The root casts floating-point inputs before it gathers anything."""
        self.reads_cast_input = modules[0]
        cast = [event for event in modules[0].forward.memory if makes_model_input(event)]
        if cast:
            self.issue("copy", ROOT, micro_batch=self.micro_batch, memory=storage_events(cast))

    def make_loss(self, modules: tuple[LoweredModule, ...]) -> None:
        """The caller of the root makes a loss of its output, and adds it to those of earlier
        forwards."""
        for module in modules:
            if module.after_root:
                self.forward(module)
        if modules[-1].sums_losses:
            self.issue("alloc", ROOT, micro_batch=self.micro_batch, memory=modules[-1].sums_losses)

    def backward(
        self, module: LoweredModule, *, hook: Callable[[InnerCall], None] | None = None
    ) -> None:
        """A module's backward: gradients of parameters are born unsharded, or added to what is
        there.

        Before it, what is recomputed, with the `hook` of each unit in the block that is called
        again. The loss, its gradient and what the graph holds outlive it: torch reduces the last
        groups before `loss.backward()` returns.
        """
        tape: Sequence[TapeEvent] = module.backward.memory
        if hook is None:  # no node of a unit stands between it and the block
            tape = [*tape, *module.events_after_hook]
        if module is self.training.modules[-1]:
            seed, _ = loss_buffers(self.training.model)
            tape = [
                event for event in tape if not (isinstance(event, Alloc) and event.buffer == seed)
            ]
        if module is self.training.last_of_backward:
            tape, ended = until_loss_goes(self.training, tape)
            self.loss += ended
        again, memory = self.gradients.events(module, tape, self.live)
        self.copy_saved(module.unit, module.backward.copies, micro_batch=self.micro_batch)
        self.waits += self.fetch_inputs(
            module.unit, module.backward.copies, micro_batch=self.micro_batch
        )
        for region in again:
            # cheap ones are kernels of no weight, and make memory all the same
            if region.kernels or region.memory:
                reads = (region.inside,) if region.inside else self.block_reads.get(module.fqn)
                self._compute(
                    "recompute", module, kernels=region.kernels, memory=region.memory, reads=reads
                )
            if region.call is not None and hook is not None:
                hook(region.call)
        # the root may only sum gradients between two units
        if module.forward != NOTHING or module.backward != NOTHING:
            self._compute("backward", module, kernels=self._backward_kernels(module), memory=memory)

    def _backward_kernels(self, module: LoweredModule) -> tuple[Kernel, ...]:
        """A module's backward, with additions to gradients that earlier micro-batches have left;
        the same object for the same ones."""
        added, dtype = tuple(self.gradients.added), self.training.precision.parameters
        if not added:
            return module.backward.kernels
        key = module.fqn, added
        if key not in self.adding:
            numels = [self.gradients.nbytes[fqn] // DTYPE_NBYTES[dtype] for fqn in added]
            self.adding[key] = (
                *module.backward.kernels,
                *(accumulate_kernel(numel, of=dtype) for numel in numels),
            )
        return self.adding[key]

    def after_hook(self, module: LoweredModule) -> None:
        """The hook after a nested unit's backward has run: the gradient of its input is added to
        the others of that value."""
        if module.events_after_hook:
            self.issue(
                "backward", module.unit, micro_batch=self.micro_batch,
                memory=storage_events(module.events_after_hook),
            )

    def _compute(
        self,
        kind: OpKind,
        module: LoweredModule,
        *,
        kernels: tuple[Kernel, ...],
        memory: Sequence[MemoryEvent],
        reads: tuple[str, ...] | None = None,
    ) -> None:
        waits, self.waits = self.waits, []
        self.issue(
            kind,
            module.unit,
            waits=waits,
            micro_batch=self.micro_batch,
            reads=self.reads[module.fqn] if reads is None else reads,
            kernels=kernels,
            memory=memory,
        )

    def begin_backward(self) -> None:
        """A backward begins, which will make every gradient of the model once more; the loss's own
        comes before any hook."""
        self.gradients.begin(self.training.modules)
        seed, _ = loss_buffers(self.training.model)
        made = self.training.modules[-1].backward.memory
        memory = [event for event in made if isinstance(event, Alloc) and event.buffer == seed]
        self.issue("alloc", ROOT, micro_batch=self.micro_batch, memory=memory)

    def release_loss(self) -> None:
        """`loss.backward()` returns: the loss's gradient goes, what the graph held, and the loss.
        """
        memory, self.loss = self.loss, []
        self.issue("free", ROOT, stream="host", micro_batch=self.micro_batch, memory=memory)
