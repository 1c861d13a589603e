"""PartitionedStep: reductions and what a rank keeps of them, at stages 1 and 2.

The ops are those of every rank. Place holders in them stand for what a rank has for itself: whole
gradients that reach into its part of the flat buffer. `of_rank` fills them. Source:
deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from zsim.ir.buffers import Buffer, buffer_of, gradient_of, numbered, owner_of, role_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Op
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import copy_kernel, move_gradients
from zsim.strategies.deepspeed_engine.engine_step import OWN, EngineStep
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.partition import Bucket, FlatPartition, Share, buckets
from zsim.strategies.replicated.buckets import ready_order

END = buffer_of("backward", OWN)
KEPT, LATER = Buffer("part.gradients"), Buffer("part.gradients.later")
PADDING = Buffer("part.padding")
"""Whole gradients that reach into a rank's part, of the first micro-batch; those of a later one,
until they are added; and zeros behind them."""


@dataclass(slots=True, kw_only=True)
class PartitionedStep(EngineStep):
    """One training step.

    `in_hooks`: gradients are reduced as they come, else at the end of accumulation in the model's
    order. `drops_others`: gradients of which a rank owns nothing go with their reduction.
    """

    COPIES_OF_OWN: ClassVar[int] = 2
    """Copies of a rank's slices: back into the bucket, and out of it."""
    flat: FlatPartition
    in_hooks: bool
    drops_others: bool
    _first_ready: str = ""
    """The parameter whose gradient is ready first."""
    _has_buffers: bool = False

    @classmethod
    def of(cls, flat: FlatPartition, *, in_hooks: bool, drops_others: bool) -> PartitionedStep:
        """An empty step."""
        made = cls(
            training=flat.training, gradients=flat.gradients, flat=flat, in_hooks=in_hooks,
            drops_others=drops_others,
        )
        ready = ready_order(flat.training)
        made._first_ready = ready[0].fqn
        order = ready if in_hooks else flat.parameters
        made.fill(buckets(order, most=flat.options.reduce_bucket_size, flat=flat))
        return made

    @property
    def _buffers(self) -> list[Alloc]:
        """The buffers that buckets lie in, in turn: two with overlap."""
        options = self.flat.options
        nbytes = options.reduce_bucket_size * self.flat.element
        return [
            Alloc(buffer_of("bucket", number), "communication", nbytes)
            for number in range(1 + options.overlap_comm)
        ]

    def hook(self, fqn: str, *, reduces: bool) -> Iterable[MemoryEvent]:
        """The first hook makes the buffers; with `reduces` the gradient goes into its bucket."""
        if fqn == self._first_ready and not self._has_buffers:
            self._has_buffers = True
            yield from self._buffers
        if reduces:
            yield from self._into_bucket(fqn)

    def _into_bucket(self, fqn: str) -> Iterator[MemoryEvent]:
        """Average the bucket that would overflow, then copy a gradient into the next one. Such a
        gradient is freed; one that is larger than a bucket stays where it is."""
        if bucket := self._closes.get(fqn):
            yield from self._averaging(bucket)
        numel = self.gradients.nbytes_of[fqn] // self.flat.element
        if numel <= self.flat.options.reduce_bucket_size:
            self._live.discard(fqn)
            yield Free(gradient_of(fqn))

    def _averaging(self, bucket: Bucket) -> Iterator[MemoryEvent]:
        """Memory of a bucket's all-reduces: a flat copy of several slices, a cast to another dtype.
        Then come the gradients that a rank keeps of it."""
        self._full.append(bucket)
        for number, slices in enumerate(bucket.reductions):
            yield from self._copies(numbered(bucket.name, number), slices)
        yield Alloc(buffer_of(bucket.name, OWN), "gradients", 0)
        if not bucket.in_buffer:
            (parameter,) = bucket.parameters
            if self.drops_others:
                self._live.discard(parameter.fqn)
                yield Free(gradient_of(parameter.fqn))
            else:
                yield Alloc(buffer_of(parameter.fqn, OWN), "gradients", 0)

    def _copies(self, name: str, slices: tuple[int, ...]) -> Iterator[MemoryEvent]:
        flat, numel = self.flat, sum(slices)
        sizes = {
            "flat": numel * flat.element if len(slices) > 1 else 0,
            "cast": numel * flat.reduced_element if flat.casts else 0,
        }
        made = [
            Alloc(buffer_of(name, role), "communication", nbytes)
            for role, nbytes in sizes.items() if nbytes
        ]
        yield from made
        yield from (Free(alloc.buffer) for alloc in reversed(made))

    def average(self, bucket: Bucket) -> None:
        """Copy gradients into the bucket's buffer, divide and average them; each rank copies its
        own slices back, an equal part on average.

        With overlap the reduction has a stream of its own, and compute waits for the one before.
        """
        flat, dtype = self.flat, self.flat.reduced_in
        kernels = [Kernel("divide", bucket.numel, 2 * bucket.numel * flat.element, flat.dtype)]
        if bucket.in_buffer:
            kernels.insert(
                0, move_gradients(
                    bucket.numel, source=flat.dtype, target=flat.dtype, reduced_in=dtype
                )
            )
        if flat.casts or any(len(slices) > 1 for slices in bucket.reductions):
            kernels.append(copy_kernel(bucket.numel, source=flat.dtype, target=dtype))
        ready = self.step.issue(
            "copy", bucket.name, waits=(self._compute, *self._reduced[-1:]),
            micro_batch=self.micro_batch, kernels=tuple(kernels),
        )
        for slices in bucket.reductions if flat.num_ranks > 1 else ():
            ready = self.step.issue(
                "all_reduce", bucket.name, stream="all_reduce", waits=(ready,), group=AXIS,
                nbytes=sum(slices) * DTYPE_NBYTES[dtype], dtype=dtype, micro_batch=self.micro_batch,
            )
        own = copy_kernel(bucket.numel // flat.num_ranks, source=dtype, target=flat.dtype)
        done = self.step.issue(
            "copy", bucket.name, waits=(ready,), micro_batch=self.micro_batch,
            kernels=(own,) * self.COPIES_OF_OWN,
            stream="all_reduce" if flat.options.overlap_comm else "compute",
        )
        self._reduced.append(done)

    def end_backward(self, *, reduces: bool) -> None:
        """Backward returns; what is left is averaged, everything where no hook has reduced. Then
        gradients, buffers and the loss go."""
        loss = self.return_from_backward()
        memory: list[MemoryEvent] = []
        if reduces:
            if not self.in_hooks:
                memory += [e for p in self.flat.parameters for e in self._into_bucket(p.fqn)]
            memory += self._averaging(self.buckets[-1])
            memory.append(Alloc(END, "gradients", 0))
            memory += [Free(alloc.buffer) for alloc in self._buffers]
            self._has_buffers = False
            self._live.clear()
            self._average_full()
        overlaps = reduces and self.flat.options.overlap_comm
        self._placed.append(
            self.step.issue(
                "free", ROOT, stream="host", waits=self._reduced[-1:] if overlaps else (),
                micro_batch=self.micro_batch, memory=[*memory, *loss],
            )
        )

    def _first(self, share: Share) -> str:
        """The first bucket of which a rank keeps anything, "" for none."""
        touched = {parameter.fqn for parameter in share.touched}
        return next(
            (b.name for b in self.buckets if any(p.fqn in touched for p in b.parameters)), ""
        )

    def kind_of(self, share: Share) -> tuple[object, ...]:
        """All that the ops of a rank depend on."""
        large = [b.parameters[0] for b in self.buckets if not b.in_buffer]
        return (
            self._first(share), share.touched_numel, share.pieces, share.padding,
            tuple(parameter.fqn for parameter in large if parameter in share.touched),
        )

    def of_rank(self, share: Share, *, first: bool) -> list[Op]:
        """The ops of a rank with this share, in the first step or a later one."""
        touched, earliest = {parameter.fqn for parameter in share.touched}, self._first(share)
        ops = list(self.step.ops)
        for index in self._placed:
            op = ops[index]
            memory = [
                filled
                for event in op.memory
                for filled in self._filled(event, op.micro_batch, share, touched, earliest)
            ]
            ops[index] = replace(op, memory=tuple(memory))
        return ops

    def _filled(
        self, event: MemoryEvent, micro_batch: int, share: Share, touched: set[str], first: str
    ) -> Iterator[MemoryEvent]:
        """An event of a rank, or what is in place of a place holder."""
        buffer, owner = event.buffer, owner_of(event.buffer)
        later = self.drops_others and micro_batch > 0
        if role_of(buffer) != OWN:
            yield event
        elif buffer == END:
            if micro_batch == self.flat.training.batch.accumulation - 1 and share.padding:
                yield Alloc(PADDING, "gradients", share.padding * self.flat.element)
            if later and touched:
                yield Free(LATER)
            if not self.drops_others:
                yield from (
                    Free(gradient_of(bucket.parameters[0].fqn)) for bucket in self.buckets
                    if not bucket.in_buffer and bucket.parameters[0].fqn not in touched
                )
        elif owner == first:
            nbytes = share.touched_numel * self.flat.element
            yield Alloc(LATER if later else KEPT, "gradients", nbytes)
        elif owner in touched:
            yield Free(gradient_of(owner))
