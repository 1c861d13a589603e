"""OffloadedPartitionedStep: stages 1 and 2 with master copies and optimizer states in host memory.

Behind each reduction a rank copies gradients of the bucket to the host: those that reach into its
part. They are cast on the device, one by one, on the stream of the reduction. At stage 2 whole
gradients go to the host after each of several micro-batches, and come back to be added to the next
ones. At the last one each is normed and searched for infinities, for which the host waits.
Source: deepspeed/runtime/zero/stage_1_and_2.py (copy_grads_in_partition).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from zsim.ir.buffers import (
    Buffer,
    buffer_of,
    form_of,
    gradient_of,
    norm_part,
    numbered,
    on_host,
    owner_of,
    role_of,
)
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, HostAlloc, Kernel, MemoryEvent, Op, Stream
from zsim.models.spec import ModelSpec, Parameter
from zsim.models.training_options import DTYPE_NBYTES, Offload, Precision
from zsim.strategies.building.host_step import crossing
from zsim.strategies.building.kernels import MASTER_DTYPE, add_kernel, copy_kernel
from zsim.strategies.deepspeed_engine.engine_step import OWN
from zsim.strategies.deepspeed_engine.offload.placement import Event, placed
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES, Bucket, FlatPartition, Share
from zsim.strategies.deepspeed_engine.searching import searched, searching_kernels
from zsim.strategies.deepspeed_engine.step import END, PartitionedStep

WIDE = "float64"
MASTER, GRADIENT, STAGING = on_host("master"), on_host("gradient"), on_host("staging")
LARGEST, STAGED = on_host("largest"), Buffer("largest")
"""Buffers of the size of the largest parameter, on the host and on the device."""


def made(flat: FlatPartition) -> Iterator[Event]:
    """A rank's part in float32 on the host, cast there from a copy, its gradient, and what goes
    back to the device. There is a buffer of the largest gradient on either side."""
    part, element, pinned = flat.part_numel, flat.element, flat.training.offload.pin_memory
    copy = Alloc(Buffer("part"), "temporaries", part * element)
    is_copy = flat.dtype != MASTER_DTYPE or flat.training.device != "cpu"
    largest = max(parameter.numel for parameter in flat.parameters) * element
    yield from [copy] if is_copy else []
    yield HostAlloc(MASTER, "optimizer_states", part * MASTER_NBYTES, pinned)
    yield from [Free(copy.buffer)] if is_copy else []
    yield HostAlloc(STAGING, "parameters", part * element, pinned)
    yield HostAlloc(LARGEST, "communication", largest, pinned)
    yield Alloc(STAGED, "communication", largest)
    yield HostAlloc(GRADIENT, "gradients", part * MASTER_NBYTES, pinned)


def pinned(
    offload: Offload, options: Any, model: ModelSpec, mesh: Mesh, precision: Precision
) -> int:
    """Bytes of a rank's pinned host memory, without whole gradients of several micro-batches."""
    if not offload.pin_memory or not offload.optimizer:
        return 0
    numels = [parameter.numel for parameter in model.parameters]
    element = DTYPE_NBYTES[precision.parameters]
    return -(-sum(numels) // mesh.dp_shard) * (2 * MASTER_NBYTES + element) + max(numels) * element


def alone(fqn: str) -> Buffer:
    """The copy of a gradient that is larger than a bucket."""
    return form_of(gradient_of(fqn), "alone")


def norm_buffer(fqn: str) -> Buffer:
    """The norm of a gradient, from its bucket's end to the step's."""
    return buffer_of(fqn, "norm")


@dataclass(slots=True, kw_only=True)
class OffloadedPartitionedStep(PartitionedStep):
    """A step of one rank's place holders, which `of_rank` fills."""

    COPIES_OF_OWN: ClassVar[int] = 1
    _sent: dict[int, Bucket] = field(default_factory=dict)
    """Ops that copy a bucket's gradients between device and host."""

    def _into_bucket(self, fqn: str) -> Iterator[MemoryEvent]:
        """A gradient that is larger than a bucket is copied into memory of its own."""
        yield from PartitionedStep._into_bucket(self, fqn)
        if fqn in self._live:
            self._live.discard(fqn)
            yield Alloc(alone(fqn), "gradients", self.gradients.nbytes_of[fqn])
            yield Free(gradient_of(fqn))

    def _averaging(self, bucket: Bucket) -> Iterator[MemoryEvent]:
        """Memory of a bucket's all-reduces; then a place holder for what a rank sends of it."""
        self._full.append(bucket)
        for number, slices in enumerate(bucket.reductions):
            yield from self._copies(numbered(bucket.name, number), slices)
        yield Alloc(buffer_of(bucket.name, OWN), "gradients", 0)

    def average(self, bucket: Bucket) -> None:
        """Average a bucket, and copy what the rank owns of it to the host."""
        PartitionedStep.average(self, bucket)
        stream: Stream = "all_reduce" if self.flat.options.overlap_comm else "compute"
        sent = self.step.issue(
            "copy", bucket.name, waits=self._reduced[-1:], micro_batch=self.micro_batch,
            stream=stream if self.flat.training.offload.pin_memory else "host",
        )
        self._sent[sent] = bucket
        self._reduced.append(sent)
        if self.is_last:
            self.step.issue(
                "host_wait", bucket.name, stream="host", waits=(sent,),
                micro_batch=self.micro_batch,
            )

    # -- ranks

    def kind_of(self, share: Share) -> tuple[object, ...]:
        """All that the ops of a rank depend on."""
        return tuple(parameter.fqn for parameter in share.touched), share.pieces, share.padding

    def of_rank(self, share: Share, *, first: bool) -> list[Op]:
        """The ops of a rank with this share; the first step makes buffers for whole gradients."""
        pieces = {p.fqn: n for p, n in zip(share.touched, share.pieces, strict=True)}
        ops = list(self.step.ops)
        for index in self._placed:
            op, events = ops[index], list[Event]()
            for event in op.memory:
                events += self._own(event, op.micro_batch, pieces, first=first)
            memory, host = placed(events, device=self.flat.training.device)
            ops[index] = replace(op, memory=tuple(memory), host=tuple(host))
        for index, bucket in self._sent.items():
            op, kernels = ops[index], list[Kernel]()
            for p in bucket.parameters:
                if p.fqn in pieces:
                    kernels += self._sending(p, pieces[p.fqn], micro_batch=op.micro_batch)
            ops[index] = replace(op, kernels=tuple(kernels))
        return ops

    def _own(
        self, event: MemoryEvent, micro_batch: int, pieces: dict[str, int], *, first: bool
    ) -> Iterator[Event]:
        """An event of a rank, or what is in place of a place holder. A large gradient that the rank
        keeps goes once it is on the host, or at the end of backward."""
        buffer = event.buffer
        if role_of(buffer) != OWN:
            yield event
            return
        is_last = micro_batch == self.flat.training.batch.accumulation - 1
        large = [bucket.parameters[0] for bucket in self.buckets if not bucket.in_buffer]
        if buffer == END:
            stay = [p for p in large if p.fqn in pieces] if self.drops_others else (
                [p for p in large if p.fqn not in pieces]
            )
            if not (self.drops_others and is_last):
                yield from (Free(alone(p.fqn)) for p in stay)
            return
        bucket = self.bucket_of[owner_of(buffer)]
        for p in bucket.parameters:
            if p.fqn in pieces:
                yield from self._sent_memory(p, pieces[p.fqn], micro_batch, first=first)
            if not bucket.in_buffer and (is_last if p.fqn in pieces else self.drops_others):
                yield Free(alone(p.fqn))

    @property
    def _accumulates(self) -> bool:
        """True where whole gradients of several micro-batches are summed. At stage 1 they are on
        the device."""
        return self.drops_others and self.flat.training.batch.accumulation > 1

    def _sent_memory(
        self, p: Parameter, piece: int, micro_batch: int, *, first: bool
    ) -> Iterator[Event]:
        if self._accumulates and first and not micro_batch:
            yield HostAlloc(
                on_host(gradient_of(p.fqn)), "gradients", p.numel * self.flat.element,
                self.flat.training.offload.pin_memory,
            )
        if micro_batch < self.flat.training.batch.accumulation - 1:
            return
        wide = Alloc(norm_part("wide"), "temporaries", DTYPE_NBYTES[WIDE] * piece)
        yield from (
            wide, Alloc(norm_buffer(p.fqn), "temporaries", DTYPE_NBYTES[WIDE]), Free(wide.buffer)
        )
        yield from searched(dtype=self.flat.dtype)
        if self.flat.dtype != MASTER_DTYPE:
            cast = Alloc(Buffer("sent.cast"), "temporaries", piece * MASTER_NBYTES)
            yield from (cast, Free(cast.buffer))

    def _sending(self, p: Parameter, piece: int, *, micro_batch: int) -> Iterator[Kernel]:
        """The work for one gradient, of which `piece` elements lie in the rank's part."""
        dtype, pinned = self.flat.dtype, self.flat.training.offload.pin_memory
        if self._accumulates:
            if micro_batch:
                yield from crossing("to_device", p.numel, dtype=dtype, pinned=pinned)
                yield add_kernel(p.numel, of=dtype, to=dtype)
            yield from crossing("to_host", p.numel, dtype=dtype, pinned=pinned)
        if micro_batch < self.flat.training.batch.accumulation - 1:
            return
        yield copy_kernel(piece, source=dtype, target=WIDE)
        yield Kernel("norm", 2 * piece, DTYPE_NBYTES[WIDE] * piece, MASTER_DTYPE)
        yield from searching_kernels(p.numel, dtype=dtype)
        if dtype != MASTER_DTYPE:
            yield copy_kernel(piece, source=dtype, target=MASTER_DTYPE)
        yield from crossing("to_host", piece, dtype=MASTER_DTYPE, pinned=pinned)
