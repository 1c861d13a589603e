"""FlatBufferStep: a training step of ZeRO on flat buffers, from unshard to the optimizer.

Strategies decide the order. Buffers are called "<param group>:<contents>"; the executor makes and
frees real ones by these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Self

from zsim.autograd.lowered import LoweredModule, ParameterGradient, TapeEvent
from zsim.ir.buffers import buffer_of, gradient_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, MemoryKind, OpKind
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import clipping, optimizers
from zsim.strategies.building.backward_events import (
    InTwo,
    forward_memory,
    until_loss_goes,
)
from zsim.strategies.building.kernels import MASTER_DTYPE, add_kernel, fill_kernel, move_gradients
from zsim.strategies.building.step_builder import StepBuilder, alloc_of, free_of
from zsim.strategies.flat_buffer.groups import FlatGroup
from zsim.strategies.flat_buffer.layout import AXIS, REPLICAS, FlatModel

Reduction = Literal["all_reduce", "reduce_scatter"]
"""A collective that averages gradients, and the stream on which it runs."""


@dataclass(slots=True)
class FlatBufferStep:
    """One training step in the words of ZeRO. It remembers what is gathered and which gradients
    live.

    `sharded`: parameters are, but for groups that stay whole, so that compute reads gathered ones.
    """

    model: FlatModel
    sharded: bool = False
    gradient_kind: MemoryKind = "unsharded_gradients"
    step: StepBuilder = field(default_factory=StepBuilder)
    micro_batch: int = 0
    _gathered: dict[str, int] = field(default_factory=dict)
    _gradients: set[str] = field(default_factory=set)
    _shards: set[str] = field(default_factory=set)
    _made: dict[str, int] = field(default_factory=dict)
    _compute: list[int] = field(default_factory=list)
    _reduced: list[int] = field(default_factory=list)
    _in_place: dict[str, int] = field(default_factory=dict)
    """The last reduction of each whole gradient that stays: what is added to it waits for that."""
    _loss: list[MemoryEvent] = field(default_factory=list)
    """The frees at the end of backward, behind the last reductions."""
    _filling: dict[tuple[str, ...], tuple[Kernel, ...]] = field(default_factory=dict)

    def copy(self) -> Self:
        """This step so far, to be ended in another way."""
        own = {each.name: copy(getattr(self, each.name)) for each in fields(self)}
        return replace(self, **{**own, "model": self.model})

    def unshard(self, *groups: FlatGroup) -> None:
        """All-gather what is not gathered yet, once the compute issued so far has ended: its memory
        is reused."""
        for group in groups:
            if group.fqn not in self._gathered:
                self._gather(group, waits=self._compute[-1:])

    def _gather(
        self, group: FlatGroup, *, waits: Sequence[int], gone: tuple[Free, ...] = ()
    ) -> None:
        """Issue the all-gather of a group, after which `gone` is not needed."""
        nbytes = self.model.full_nbytes(group)
        whole = Alloc(buffer_of(group.fqn, "unsharded"), "unsharded_parameters", nbytes)
        self._gathered[group.fqn] = self.step.issue(
            "all_gather",
            group.fqn,
            stream="all_gather",
            waits=waits,
            group=AXIS,
            nbytes=nbytes,
            dtype=self.model.dtype,
            micro_batch=self.micro_batch,
            memory=(whole, *gone),
        )

    def reshard(self, *groups: FlatGroup) -> None:
        """Free gathered parameters."""
        for group in groups:
            del self._gathered[group.fqn]
            self._free(group, "unsharded")

    def forward(self, module: LoweredModule) -> None:
        """Compute with the parameters of the module, which must be gathered."""
        memory = forward_memory(self.model.training, module)
        waits = self.step.save_inputs(
            module.unit, module.forward.copies, micro_batch=self.micro_batch
        )
        self._issue_compute(
            "forward", module, kernels=module.forward.kernels, memory=memory, waits=waits
        )
        self.step.copy_saved(module.unit, module.forward.copies, micro_batch=self.micro_batch)

    def backward(self, module: LoweredModule) -> None:
        """Compute; each gradient is added into the flat gradient of its group, which is made, of
        zeros, when missing."""
        missing = [
            group
            for group in self.model.needs[module.fqn]
            if group.trained and group.fqn not in self._gradients
        ]
        recomputation, memory = self._backward_memory(module, missing)
        self.step.copy_saved(module.unit, module.backward.copies, micro_batch=self.micro_batch)
        waits = self.step.fetch_inputs(
            module.unit, module.backward.copies, micro_batch=self.micro_batch
        )
        # cheap ones are kernels of no weight, and make memory all the same
        if module.recompute or recomputation:
            self._issue_compute(
                "recompute", module, kernels=module.recompute, memory=recomputation, waits=waits
            )
        self._issue_compute(
            "backward", module, kernels=self._backward_kernels(module, missing), memory=memory,
            waits=waits,
        )

    def _backward_kernels(
        self, module: LoweredModule, missing: list[FlatGroup]
    ) -> tuple[Kernel, ...]:
        """The same tuple for every micro-batch that finds the same gradients missing: kernels are
        timed once for each tuple."""
        key = (module.fqn, *(group.fqn for group in missing))
        if key not in self._filling:
            fills = [
                fill_kernel(group.layout.padded_numel, dtype=self.model.gradient_dtype)
                for group in missing
            ]
            self._filling[key] = (*fills, *self.model.adding_kernels[module.fqn])
        return self._filling[key]

    def _issue_compute(
        self, kind: OpKind, module: LoweredModule, *, kernels: tuple[Kernel, ...],
        memory: Iterable[MemoryEvent], waits: Iterable[int] = (),
    ) -> None:
        backward = kind != "forward"
        reads = tuple(
            group.fqn for group in self.model.needs[module.fqn]
            if self.sharded and not group.whole
        )
        index = self.step.issue(
            kind, module.unit,
            waits=(
                *waits, *(self._gathered[fqn] for fqn in reads),
                *(self._added_to(module) if backward else ()),
            ),
            micro_batch=self.micro_batch, reads=reads, kernels=kernels, memory=memory,
        )
        self._compute.append(index)

    def _added_to(self, module: LoweredModule) -> list[int]:
        """The reductions in place of the gradients that `module` adds to."""
        return [
            self._in_place[g.fqn] for g in self.model.needs[module.fqn] if g.fqn in self._in_place
        ]

    def _backward_memory(
        self, module: LoweredModule, missing: list[FlatGroup]
    ) -> InTwo:
        self._gradients.update([group.fqn for group in missing])
        made = [
            alloc_of(
                buffer_of(group.fqn, "gradients"), self.gradient_kind,
                self.model.full_nbytes(group, self.model.gradient_dtype),
            )
            for group in missing
        ]
        tape: Sequence[TapeEvent] = module.backward.memory
        if module is self.model.training.last_of_backward:
            tape, self._loss = until_loss_goes(self.model.training, tape)
        return self.model.backwards.of(module, tape, self._born, first=made)

    def _born(self, event: ParameterGradient) -> tuple[list[Alloc], list[Free]]:
        """A gradient is made apart; the last of a parameter's gradients lets all of them be added
        and freed. Of one that is somebody else's too torch adds the original. Where kept gradients
        have another dtype, a copy is the parameter's gradient until it is added."""
        fqn = event.fqn
        if event.is_copy and self.model.gradient_dtype == self.model.dtype:
            return [], []
        number = self._made[fqn] = self._made.get(fqn, 0) + 1
        over = number == self.model.uses[fqn] and self._made.pop(fqn)
        frees = [free_of(gradient_of(fqn, each)) for each in range(number, 0, -1)] if over else []
        nbytes = self.model.made_nbytes[fqn]
        return [alloc_of(gradient_of(fqn, number), "temporaries", nbytes)], frees

    def release_loss(self) -> None:
        """`loss.backward()` returns: the loss's gradient goes, what the graph held, and the loss.
        """
        memory, self._loss = self._loss, []
        self.step.issue(
            "free", ROOT, stream="host", micro_batch=self.micro_batch, memory=memory
        )

    @property
    def in_last_micro_batch(self) -> bool:
        """True where no micro-batch follows."""
        return self.micro_batch == self.model.training.batch.accumulation - 1

    @property
    def over_replicas(self) -> bool:
        """True where reductions go on over replicas: once in a step, of what its micro-batches have
        summed."""
        return self.model.num_replicas > 1 and self.in_last_micro_batch

    def all_reduce_gradients(self, group: FlatGroup) -> None:
        """Average the whole flat gradient in place, over replicas only this rank's slice."""
        self._reduce_in_place(group, "all_reduce", numel=group.layout.padded_numel)

    def reduce_scatter_in_place(self, group: FlatGroup) -> None:
        """Average into this rank's slice of the flat gradient, which stays whole."""
        self._reduce_in_place(group, "reduce_scatter", numel=group.layout.shard_numel)

    def _reduce_in_place(self, group: FlatGroup, kind: Reduction, *, numel: int) -> None:
        """Reduce the gradient, or the copy of it, of which `numel` elements are this rank's then.
        """
        self._reduce(group, kind)
        if self.over_replicas:
            self._reduce_over_replicas(group)
            kind, numel = "all_reduce", group.layout.shard_numel
        self._put_back(group, kind, numel=numel)

    def _put_back(self, group: FlatGroup, stream: Reduction, *, numel: int) -> None:
        """Cast `numel` reduced elements back into the gradient, on the reduction's stream.

        Where micro-batches follow, each rank keeps its own slice of the sum, and zeros elsewhere.
        """
        model, kernels = self.model, list[Kernel]()
        if model.casts_gradients:
            kernels.append(self._moved(numel, back=True))
        if not self.in_last_micro_batch:
            kernels.append(
                fill_kernel(
                    group.layout.padded_numel - group.layout.shard_numel,
                    dtype=model.gradient_dtype,
                )
            )
        if kernels:
            self._issue_after_reduction(group, stream, kernels, self._input_gone(group))
        self._in_place[group.fqn] = self._reduced[-1]

    def reduce_scatter_gradients(self, group: FlatGroup) -> None:
        """Average into the gradient shard, which is made or added to, and free the whole gradient.
        """
        model, kept, shard = self.model, group.fqn in self._shards, group.layout.shard_numel
        made = Alloc(
            buffer_of(group.fqn, "gradient_shard"), "gradients",
            model.shard_nbytes(group, model.gradient_dtype),
        )
        self._shards.add(group.fqn)
        if not kept and not model.casts_gradients:
            self._reduce(group, "reduce_scatter", memory=(made,))
        else:
            dtype = model.training.precision.reduce
            output = Alloc(
                buffer_of(group.fqn, "reduce_output"), "communication",
                model.shard_nbytes(group, dtype),
            )
            self._reduce(group, "reduce_scatter", memory=(output, *self._input_gone(group)))
            stream: Reduction = "reduce_scatter"
            if self.over_replicas and model.casts_gradients:
                stream = "all_reduce"
                if kept:  # sums over replicas are in the reduce dtype too
                    added = add_kernel(shard, of=model.gradient_dtype, to=dtype)
                    self._issue_after_reduction(
                        group, "reduce_scatter", [added], (Free(made.buffer),)
                    )
                    kept = False
                self._reduce_over_replicas(group)
            kernel = (
                add_kernel(shard, of=dtype, to=model.gradient_dtype)
                if kept
                else self._moved(shard, back=True)
            )
            memory = (*(() if kept else (made,)), Free(output.buffer))
            self._issue_after_reduction(group, stream, [kernel], memory)
        if self.over_replicas and not model.casts_gradients:
            self._reduce_over_replicas(group)
        self._gradients.remove(group.fqn)
        self._free(group, "gradients")

    def complete(self, group: FlatGroup) -> None:
        """The gradient of a group is whole, and reduced; it stays where it is."""

    def _input_gone(self, group: FlatGroup) -> tuple[Free, ...]:
        return (Free(buffer_of(group.fqn, "reduce_input")),) if self.model.casts_gradients else ()

    def _moved(self, numel: int, *, back: bool = False) -> Kernel:
        """Gradients cast to the dtype that they are reduced in, or back."""
        kept, reduced_in = self.model.gradient_dtype, self.model.training.precision.reduce
        source, target = (reduced_in, kept) if back else (kept, reduced_in)
        return move_gradients(numel, source=source, target=target, reduced_in=reduced_in)

    def _reduce(
        self, group: FlatGroup, kind: Reduction, *, memory: tuple[MemoryEvent, ...] = ()
    ) -> None:
        """The collective over shards, if there are several, of a copy of the gradient where it is
        reduced in another dtype."""
        reduce_dtype = self.model.training.precision.reduce
        nbytes = self.model.full_nbytes(group, reduce_dtype)
        ready = self._compute[-1]
        if self.model.casts_gradients:
            ready = self.step.issue(
                "copy",
                group.fqn,
                micro_batch=self.micro_batch,
                kernels=(self._moved(group.layout.padded_numel),),
                memory=(Alloc(buffer_of(group.fqn, "reduce_input"), "communication", nbytes),),
            )
        if self.model.num_shards > 1:
            ready = self.step.issue(
                kind,
                group.fqn,
                stream=kind,
                waits=(ready,),
                group=AXIS,
                nbytes=nbytes,
                dtype=reduce_dtype,
                micro_batch=self.micro_batch,
                memory=memory,
            )
        self._reduced.append(ready)

    def _reduce_over_replicas(self, group: FlatGroup) -> None:
        """All-reduce this rank's shard of the gradient in place, behind its reduction over shards.
        """
        dtype = self.model.training.precision.reduce
        self._reduced[-1] = self.step.issue(
            "all_reduce",
            group.fqn,
            stream="all_reduce",
            waits=self._reduced[-1:],
            group=REPLICAS,
            nbytes=self.model.shard_nbytes(group, dtype),
            dtype=dtype,
            micro_batch=self.micro_batch,
        )

    def _issue_after_reduction(
        self, group: FlatGroup, stream: Reduction, kernels: list[Kernel],
        memory: tuple[MemoryEvent, ...],
    ) -> None:
        """Issue `kernels` on the output of a group's reduction; later waits for the reduction wait
        for them too."""
        self._reduced[-1] = self.step.issue(
            "copy",
            group.fqn,
            stream=stream,
            waits=self._reduced[-1:],
            micro_batch=self.micro_batch,
            kernels=tuple(kernels),
            memory=memory,
        )

    def optimizer(self, *, first: bool) -> int:
        """Step this rank's shards, or float32 copies, and return the op; the first step makes the
        optimizer's states."""
        model = self.model
        stepped = model.training.precision.stepped
        self.step.begin("optimizer")
        kernels = optimizers.kernels(
            model.stepped, optimizer=model.training.optimizer, dtype=stepped, of=model.dtype,
            device=model.training.device, gradients=model.gradient_dtype,
        )
        waits = self._clip() if model.training.optimizer.clip_norm else self._reduced
        return self.step.issue(
            "optimizer", ROOT, waits=waits, kernels=kernels,
            memory=self._optimizer_memory(first=first),
        )

    def _clip(self) -> list[int]:
        """Clip this rank's shards by the norm of all of them: the norms of its own, all-reduced,
        and the total of those."""
        model, dtype = self.model, self.model.gradient_dtype
        count, sharded = len(model.stepped), model.num_shards > 1
        norms = self.step.issue(
            "optimizer",
            clipping.NORMS,
            waits=self._reduced,
            kernels=clipping.norms_kernels(model.stepped, dtype=dtype),
            memory=clipping.norms_memory(count, dtype=dtype, sharded=sharded),
        )
        if sharded:
            norms = self.step.issue(
                "all_reduce",
                clipping.NORMS,
                stream="all_reduce",
                waits=(norms,),
                group=AXIS,
                nbytes=count * DTYPE_NBYTES[dtype],
                dtype=dtype,
                memory=clipping.reduced_memory(count, dtype=dtype),
            )
        clipped = self.step.issue(
            "optimizer",
            clipping.CLIP,
            waits=(norms, *self._reduced),
            kernels=clipping.clip_kernels(model.stepped, dtype=dtype),
            memory=clipping.clip_memory(count, dtype=dtype, sharded=sharded),
        )
        return [clipped]

    def _optimizer_memory(self, *, first: bool) -> Iterator[MemoryEvent]:
        model, optimizer = self.model, self.model.training.optimizer
        widens = model.has_master and model.gradient_dtype != MASTER_DTYPE
        casts = model.trained if widens else ()
        for group in casts:
            yield Alloc(
                buffer_of(group.fqn, "master_gradient"), "temporaries",
                model.shard_nbytes(group, MASTER_DTYPE),
            )
        yield from optimizers.memory(
            model.stepped,
            optimizer=optimizer,
            dtype=model.training.precision.stepped,
            device=model.training.device,
            owner="optimizer",
            first=first,
        )
        for group in casts:
            yield Free(buffer_of(group.fqn, "master_gradient"))

    def all_gather_parameters(self, group: FlatGroup, *, after: int) -> None:
        """All-gather stepped shards in place, into the whole parameters that every rank keeps."""
        self.step.issue(
            "all_gather",
            group.fqn,
            stream="all_gather",
            waits=(after,),
            group=AXIS,
            nbytes=self.model.full_nbytes(group),
            dtype=self.model.dtype,
        )

    def zero_grad(self) -> None:
        """Free whatever gradients still live."""
        self.step.begin("zero_grad")
        for group in self.model.groups:
            if group.fqn in self._gradients:
                self._free(group, "gradients")
            if group.fqn in self._shards:
                self._free(group, "gradient_shard")

    def _free(self, group: FlatGroup, part: str) -> None:
        buffer = Free(buffer_of(group.fqn, part))
        self.step.issue(
            "free", group.fqn, stream="host", micro_batch=self.micro_batch, memory=(buffer,)
        )
