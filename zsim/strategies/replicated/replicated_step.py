"""The vocabulary of DDP, for ddp and zero_redundancy: whole parameters everywhere, gradients
reduced in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from zsim.autograd.lowered import LoweredModule, ParameterGradient
from zsim.ir.buffers import Buffer, bucket_of, buffer_of, form_of, gradient_of, numbered
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import clipping, optimizers
from zsim.strategies.building.backward_events import (
    forward_memory,
)
from zsim.strategies.building.kernels import MASTER_DTYPE, move_gradients
from zsim.strategies.building.step_builder import StepBuilder, alloc_of, free_of
from zsim.strategies.replicated import construction
from zsim.strategies.replicated.buckets import AXIS, USED, Bucket, ReplicatedModel
from zsim.strategies.replicated.construction import collective_over_replicas


@dataclass(slots=True)
class ReplicatedStep:
    """One training step in the words of DDP. It remembers which gradients live."""

    model: ReplicatedModel
    buckets: tuple[Bucket, ...]
    step: StepBuilder = field(default_factory=StepBuilder)
    micro_batch: int = 0
    _live: dict[str, None] = field(default_factory=dict)
    _viewed: bool = False
    _made: dict[str, list[Buffer]] = field(default_factory=dict)
    _compute: int = 0
    _reductions: list[int] = field(default_factory=list)
    _reduced: list[int] = field(default_factory=list)
    _in_one_bucket: bool = False
    _last: list[str] = field(default_factory=list)
    _last_of: tuple[Bucket, ...] | None = None
    """The buckets of which `_last` are the last gradients."""
    _casts: dict[str, list[MemoryEvent]] = field(default_factory=dict)
    """Casts of buckets, which a hook makes and drops inside backward; by the parameter that
    completes them."""
    _casts_of: tuple[Bucket, ...] = ()
    """The buckets that `_casts` are of."""

    def copy(self) -> ReplicatedStep:
        """This step so far, to be ended in another way."""
        made = {fqn: list(buffers) for fqn, buffers in self._made.items()}
        return replace(
            self,
            step=copy(self.step),
            _live=dict(self._live),
            _made=made,
            _reductions=list(self._reductions),
            _reduced=list(self._reduced),
        )

    def repeated(self, *, synchronises: bool) -> bool:
        """True where this micro-batch begins as one before, whose ops it then has."""
        state = synchronises, self._viewed, self._in_one_bucket, *self._live
        return self.step.repeat(self.micro_batch, state, self._reduced) > 0

    def begin_in_one_bucket(self) -> None:
        """Begin with one bucket of everything, for the first synchronised backward."""
        self.buckets, self._in_one_bucket = (tuple(chain.from_iterable(self.model.rebuilt)),), True

    @property
    def has_reduced(self) -> bool:
        """True after the one bucket of everything is reduced, until it is replaced."""
        return self._in_one_bucket and bool(self._reduced)

    def rebuild_buckets(self) -> None:
        """Broadcast rank 0's order and the buckets' sizes; replace the one bucket by those of later
        backwards, a storage for each.

        The old one goes first, unless gradients are views of it: then it goes when they have moved.
        What is broadcast is written on the host and copied, and both live until all is sent.
        torch/csrc/distributed/c10d/reducer.cpp.
        """
        self.buckets, self._in_one_bucket = self.model.rebuilt, False
        order = len(self.model.reduced) + 1
        sent: list[MemoryEvent] = []
        for unit, count in (("bucket_order", order), ("bucket_sizes", len(self.buckets))):
            copies = ("host", "device") if self.model.training.device == "cpu" else ("device",)
            made = [Alloc(buffer_of(unit, copy), "communication", 4 * count) for copy in copies]
            sent = [*(Free(alloc.buffer) for alloc in made), *sent]
            ended = sent if unit == "bucket_sizes" else []
            collective_over_replicas(
                self.step, self.model, "broadcast", unit, 4 * count, dtype="int32",
                memory=(*made, *ended),
            )
        storages, gone = self.model.storages, Free(construction.ONE_BUCKET)
        memory: tuple[MemoryEvent, ...] = (*storages, gone) if self._viewed else (gone, *storages)
        self.step.issue(
            "alloc", "buckets", stream="host", micro_batch=self.micro_batch, memory=memory
        )

    def broadcast_buffers(self) -> None:
        """Before a forward: rank 0's buffers for everyone."""
        construction.broadcast_buffers(self.step, self.model, micro_batch=self.micro_batch)

    def forward(self, module: LoweredModule) -> None:
        """Compute with whole parameters. Where DDP looks for unused ones, it returns a copy of the
        loss, and lets the loss go."""
        memory = forward_memory(self.model.training, module)
        if self.model.finds_unused and any(
            module is forward[-1] for forward in self.model.training.forwards
        ):
            losses = [
                event
                for event in module.forward.memory
                if isinstance(event, Alloc) and event.buffer in self.model.losses
            ]
            made = [
                Alloc(form_of(loss.buffer, "copy"), "temporaries", loss.nbytes) for loss in losses
            ]
            index = len(module.forward.events)
            dropped = [Free(copy.buffer) for copy in made]
            memory = (*memory[:index], *made, *dropped, *memory[index:])
        waits = self.step.save_inputs(
            module.unit, module.forward.copies, micro_batch=self.micro_batch
        )
        self._compute = self.step.issue(
            "forward", module.unit, micro_batch=self.micro_batch, kernels=module.forward.kernels,
            memory=memory, waits=waits,
        )
        self.step.copy_saved(module.unit, module.forward.copies, micro_batch=self.micro_batch)

    def backward(self, module: LoweredModule, *, synchronises: bool) -> None:
        """Compute; gradients live by themselves, or go into their bucket as soon as they are ready.
        """
        buckets = self.buckets if synchronises and self.model.casts else ()
        if self._casts_of is not buckets:
            self._casts, self._casts_of = self._casts_by_gradient() if buckets else {}, buckets
        recomputation, memory = self.model.backwards.of(
            module, module.backward.memory,
            partial(self._born, into_buckets=synchronises and self.model.views),
        )
        self.step.copy_saved(module.unit, module.backward.copies, micro_batch=self.micro_batch)
        waits = self.step.fetch_inputs(
            module.unit, module.backward.copies, micro_batch=self.micro_batch
        )
        # cheap ones are kernels of no weight, and make memory all the same
        if module.recompute or recomputation:
            self.step.issue(
                "recompute", module.unit, micro_batch=self.micro_batch, kernels=module.recompute,
                memory=recomputation, waits=waits,
            )
        kernels = (
            self.model.adding_kernels[module.fqn] if self.micro_batch else module.backward.kernels
        )
        self._compute = self.step.issue(
            "backward", module.unit, micro_batch=self.micro_batch, kernels=kernels, memory=memory,
            waits=waits,
        )

    def _born(
        self, event: ParameterGradient, *, into_buckets: bool
    ) -> tuple[list[Alloc], list[MemoryEvent]]:
        """A first gradient is kept; later ones, of more micro-batches or a tied parameter, are
        added to it. And what comes after that."""
        fqn, nbytes = event.fqn, self.model.nbytes_of[event.fqn]
        names = self._made.setdefault(fqn, [])
        kept = fqn in self._live or self._viewed
        names.append(gradient_of(fqn, len(names) + 1))
        births = [alloc_of(names[-1], "temporaries", nbytes)]
        if kept and event.is_copy:
            births = []
        elif not kept and len(names) == 1:
            names[-1] = gradient_of(fqn)
            self._live[fqn] = None
            births = [alloc_of(names[-1], "gradients", nbytes)]
        if len(names) < self.model.uses[fqn]:
            return births, []
        del self._made[fqn]
        parts = [free_of(name) for name in reversed(names) if births and name != gradient_of(fqn)]
        moved = [free_of(gradient_of(fqn))] if into_buckets and fqn in self._live else []
        if moved:
            del self._live[fqn]
        # What was there has moved into its bucket when the hook runs; what has just come lives
        # until it is over.
        return births, [*(moved if parts else ()), *self._casts.get(fqn, ()), *(parts or moved)]

    def _last_gradients(self) -> list[str]:
        """The gradient after which each bucket is reduced, none before the buckets ahead of it.

        Unused parameters are ready with the first gradient of all.
        """
        if self._last_of is not self.buckets:
            readiness = self.model.readiness
            last = [min(readiness, key=readiness.__getitem__)]
            for bucket in self.buckets:
                ready = [
                    last[-1],
                    *(parameter.fqn for parameter in bucket if parameter.fqn in readiness),
                ]
                last.append(max(ready, key=readiness.__getitem__))
            self._last, self._last_of = last[1:], self.buckets
        return self._last

    def _casts_by_gradient(self) -> dict[str, list[MemoryEvent]]:
        element = DTYPE_NBYTES[self.model.training.precision.reduce]
        casts: dict[str, list[MemoryEvent]] = {}
        for number, fqn in enumerate(self._last_gradients()):
            nbytes = element * sum(parameter.numel for parameter in self.buckets[number])
            cast = Alloc(buffer_of(bucket_of(number), "cast"), "communication", nbytes)
            casts.setdefault(fqn, []).extend((cast, Free(cast.buffer)))
        return casts

    def reduce_ready_buckets(self, module: LoweredModule) -> None:
        """Pack and average the gradients of each bucket that `module` completes."""
        last = self._last_gradients()
        for number, fqn in enumerate(last):
            if self.model.last_module[fqn] == module.fqn:
                self._reduce(number)
        if (
            self.model.finds_unused
            and self.model.num_replicas > 1
            and self.model.last_module[last[-1]] == module.fqn
        ):
            self._reduce_used()

    def _reduce_used(self) -> None:
        """Tell the other ranks which parameters this one has used, after the last bucket."""
        reduced = self.step.issue(
            "all_reduce",
            USED,
            stream="all_reduce",
            waits=(self._compute,),
            group=AXIS,
            nbytes=self.model.used_nbytes,
            dtype="int32",
            micro_batch=self.micro_batch,
        )
        self._reductions.append(reduced)

    def _reduce(self, number: int) -> None:
        """Copy gradients into their bucket, a kernel for each, which divides by the number of
        replicas too; all-reduce it.

        In another dtype the bucket is cast, divided and cast back by a hook of its own
        (default_hooks.py). It casts back in a callback of the all-reduce's future, beside the next
        all-reduce (ATen/core/ivalue_inl.h, invokeCallback: a stream from the pool).
        """
        model, dtype, unit, bucket = (
            self.model, self.model.training.precision.reduce, bucket_of(number),
            self.buckets[number],
        )
        numel = sum([parameter.numel for parameter in bucket])
        nbytes = numel * DTYPE_NBYTES[dtype]
        kernels = model.filling_kernels(bucket)
        if model.casts:
            cast = move_gradients(numel, source=model.dtype, target=dtype, reduced_in=dtype)
            kernels = (*kernels, cast, Kernel("divide", numel, 2 * nbytes, dtype))
        reduced = self.step.issue(
            "copy", unit, waits=(self._compute,), micro_batch=self.micro_batch, kernels=kernels
        )
        if model.num_replicas > 1:
            reduced = self.step.issue(
                "all_reduce",
                unit,
                stream="all_reduce",
                waits=(reduced,),
                group=AXIS,
                nbytes=nbytes,
                dtype=dtype,
                micro_batch=self.micro_batch,
            )
        if model.casts:
            back = (move_gradients(numel, source=dtype, target=model.dtype, reduced_in=dtype),)
            reduced = self.step.issue(
                "copy", unit, stream="callback", waits=(reduced,), micro_batch=self.micro_batch,
                kernels=back,
            )
        self._reductions.append(reduced)

    def copy_back(self) -> None:
        """The end of a synchronised backward: bucket by bucket, wait for it and, unless they are
        views of it, fill its gradients.

        torch/csrc/distributed/c10d/reducer.cpp, finalize_backward. With the last bucket, wait for
        the map of used parameters.
        """
        self._viewed = self.model.views
        last = len(self.buckets) - 1
        for number, bucket in enumerate(self.buckets):
            self._reduced = [
                self.step.issue(
                    "copy", bucket_of(number),
                    waits=self._reductions[number:]
                    if number == last
                    else (self._reductions[number],), micro_batch=self.micro_batch,
                    kernels=() if self.model.views else self.model.copying_kernels(bucket),
                )
            ]
        self._reductions = []

    def optimizer(self, owned: Sequence[int], *, first: bool, has_master: bool) -> int:
        """Step the parameters of `owned` elements; with a master copy their gradients are cast to
        float32 for it."""
        optimizer, device = self.model.training.optimizer, self.model.training.device
        dtype = MASTER_DTYPE if has_master else self.model.dtype
        self.step.begin("optimizer")
        memory: list[MemoryEvent] = []
        casts = [
            Alloc(numbered("master_gradient", i), "temporaries", 4 * n)
            for i, n in enumerate(owned)
            if has_master
        ]
        memory += casts
        memory += optimizers.memory(
            owned, optimizer=optimizer, dtype=dtype, device=device, owner="optimizer", first=first
        )
        memory += [Free(cast.buffer) for cast in casts]
        kernels = optimizers.kernels(
            owned, optimizer=optimizer, dtype=dtype, of=self.model.dtype, device=device
        )
        waits = self._clip() if optimizer.clip_norm else self._reduced
        return self.step.issue("optimizer", ROOT, waits=waits, kernels=kernels, memory=memory)

    def _clip(self) -> list[int]:
        """Clip whole gradients, which every rank has, by their norm."""
        numels = [parameter.numel for parameter in self.model.trained]
        memory = (
            *clipping.norms_memory(len(numels), dtype=self.model.dtype, sharded=False),
            *clipping.clip_memory(len(numels), dtype=self.model.dtype, sharded=False),
        )
        kernels = (
            *clipping.norms_kernels(numels, dtype=self.model.dtype),
            *clipping.clip_kernels(numels, dtype=self.model.dtype),
        )
        return [
            self.step.issue(
                "optimizer", clipping.CLIP, waits=self._reduced, kernels=kernels, memory=memory
            )
        ]

    def zero_grad(self) -> None:
        """Free the gradients that are not views of their buckets."""
        self.step.begin("zero_grad")
        memory = tuple(Free(gradient_of(fqn)) for fqn in self._live)
        self._live.clear()
        self.step.issue("free", ROOT, stream="host", micro_batch=self.micro_batch, memory=memory)
