"""EngineStep: forward and backward of a step under DeepSpeed's engine, at all stages.

The engine scales the loss, by 1 without fp16. The hook of each parameter runs when its gradient is
accumulated; stages differ in what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from zsim.autograd.lowered import (
    InnerCall,
    LoweredModule,
    ParameterGradient,
    TapeEvent,
)
from zsim.ir.buffers import Buffer, buffer_of, gradient_of
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.spec import ROOT
from zsim.strategies.building.backward_events import (
    forward_memory,
    until_loss_goes,
)
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.building.training import Training
from zsim.strategies.deepspeed_engine.partition import Bucket
from zsim.strategies.replicated.buckets import ReplicatedModel

SCALED, SCALED_GRADIENT = buffer_of("loss", "scaled"), buffer_of("loss", "scaled_gradient")
"""The loss times its scale, and the gradient behind that product."""
OWN = "own"
"""Role of a place holder for what a rank has for itself."""


@dataclass(slots=True)
class EngineStep:
    """One training step. `gradients`: whole gradients as every rank makes them, which are DDP's."""

    training: Training
    gradients: ReplicatedModel
    step: StepBuilder = field(default_factory=StepBuilder)
    micro_batch: int = 0
    buckets: tuple[Bucket, ...] = ()
    bucket_of: dict[str, Bucket] = field(default_factory=dict)
    """Buckets by the units of their ops."""
    _closes: dict[str, Bucket] = field(default_factory=dict)
    """The bucket that is reduced before a gradient is copied into the next one, by parameter."""
    _compute: int = -1
    _reduced: list[int] = field(default_factory=list)
    _made: dict[str, list[Buffer]] = field(default_factory=dict)
    _live: set[str] = field(default_factory=set)
    """Gradients that wait for later micro-batches, or for the end."""
    _full: list[Bucket] = field(default_factory=list)
    """Buckets whose reduction is not issued yet."""
    _loss: list[MemoryEvent] = field(default_factory=list)
    _placed: list[int] = field(default_factory=list)
    """Ops that may have place holders, in order."""

    def fill(self, buckets: tuple[Bucket, ...]) -> None:
        """Reduce gradients in these buckets."""
        self.buckets, self.bucket_of = buckets, {bucket.name: bucket for bucket in buckets}
        self._closes = {
            after.parameters[0].fqn: before
            for before, after in pairwise(buckets)
        }

    @property
    def is_last(self) -> bool:
        """True where no micro-batch follows."""
        return self.micro_batch == self.training.batch.accumulation - 1

    def hook(self, fqn: str, *, reduces: bool) -> Iterable[MemoryEvent]:
        """Memory of the hook of a parameter whose gradient is accumulated."""
        raise NotImplementedError

    def average(self, bucket: Bucket) -> None:
        """Issue the reduction of a bucket."""
        raise NotImplementedError

    def forward(self, module: LoweredModule) -> None:
        """Compute with whole parameters."""
        self._forward(module, forward_memory(self.training, module))

    def _forward(self, module: LoweredModule, memory: Sequence[MemoryEvent]) -> None:
        copies = module.forward.copies
        waits = self.step.save_inputs(module.unit, copies, micro_batch=self.micro_batch)
        self._compute = self.step.issue(
            "forward", module.unit, micro_batch=self.micro_batch, kernels=module.forward.kernels,
            memory=memory, waits=waits,
        )
        self.step.copy_saved(module.unit, copies, micro_batch=self.micro_batch)

    def backward(
        self, module: LoweredModule, *, reduces: bool,
        again: Callable[[InnerCall], None] = lambda _: None,
    ) -> None:
        """Compute. Each gradient goes into the bucket, which is reduced before it would overflow;
        or it stays. `again` is told of modules that a recomputation calls."""
        regions, memory = self.gradients.backwards_in_turn.of(
            module, tuple(self._tape(module)), lambda event: self._born(event, reduces=reduces)
        )
        copies = module.backward.copies
        self.step.copy_saved(module.unit, copies, micro_batch=self.micro_batch)
        waits = self.step.fetch_inputs(module.unit, copies, micro_batch=self.micro_batch)
        issued: list[int] = []
        for region in regions:
            if region.kernels or region.memory:
                issued.append(self.step.issue(
                    "recompute", region.inside or module.unit, micro_batch=self.micro_batch,
                    kernels=region.kernels, memory=region.memory, waits=waits,
                ))
                waits = []
            if region.call is not None:
                again(region.call)
        adds = self.micro_batch and not reduces
        self._compute = self.step.issue(
            "backward", module.unit, micro_batch=self.micro_batch, waits=waits,
            kernels=self.gradients.adding_kernels[module.fqn] if adds else module.backward.kernels,
            memory=memory,
        )
        if self._full:  # place holders are of buckets that are reduced
            self._placed += [*issued, self._compute]
        self._average_full()

    def _tape(self, module: LoweredModule) -> Iterator[TapeEvent]:
        """The backward of `module`. In front of the first one's the loss is scaled; what goes after
        the last one's waits for the end of backward."""
        tape: Sequence[TapeEvent] = module.backward.memory
        if module is self.training.last_of_backward:
            tape, self._loss = until_loss_goes(self.training, tape)
        if module is not self.training.modules[-1]:
            yield from tape
            return
        seed, *rest = tape
        assert isinstance(seed, Alloc)
        yield from self.begin_backward(seed)
        over = next(index for index, event in enumerate(rest) if isinstance(event, Free))
        yield from (*rest[:over], Free(SCALED_GRADIENT), *rest[over:])

    def begin_backward(self, seed: Alloc) -> Iterable[MemoryEvent]:
        """The scaled loss, the gradient that backward begins with, and the one behind the scale."""
        return (
            Alloc(SCALED, "activations", seed.nbytes), seed,
            Alloc(SCALED_GRADIENT, "temporaries", seed.nbytes),
        )

    def _born(
        self, event: ParameterGradient, *, reduces: bool
    ) -> tuple[list[Alloc], list[MemoryEvent]]:
        """A gradient of a parameter; with its last one in this micro-batch, what its hook does."""
        fqn, whole = event.fqn, gradient_of(event.fqn)
        made, kept = self._made.setdefault(fqn, []), fqn in self._live
        made.append(gradient_of(fqn, len(made) + 1))
        births = [Alloc(made[-1], "temporaries", self.gradients.nbytes_of[fqn])]
        if kept and event.is_copy:
            births = []
        elif not kept and len(made) == 1:
            made[-1] = whole
            births = [Alloc(whole, "gradients", self.gradients.nbytes_of[fqn])]
        if len(made) < self.gradients.uses[fqn]:
            return births, []
        del self._made[fqn]
        self._live.add(fqn)
        parts = [Free(name) for name in reversed(made) if births and name != whole]
        return births, [*parts, *self.hook(fqn, reduces=reduces)]

    def _average_full(self) -> None:
        """Issue what is full, in the order of accumulation; gradients may be born in another."""
        full, self._full = self._full, []
        for bucket in sorted(full, key=lambda each: each.number):
            self.average(bucket)

    def return_from_backward(self) -> list[MemoryEvent]:
        """`loss.backward()` returns: its first gradient goes. Returns the frees of the losses,
        which are last."""
        seed, *loss = self._loss
        self.step.issue(
            "free", ROOT, stream="host", micro_batch=self.micro_batch, memory=[seed]
        )
        return [Free(SCALED), *loss]
