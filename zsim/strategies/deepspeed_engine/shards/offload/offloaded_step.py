"""OffloadedShardedStep: stage 3 with master copies, optimizer states and gradients of shards in
host memory.

Behind each reduce-scatter a rank copies its shards of gradients to the host, one by one, and back
to the device. At the last micro-batch each is normed there, cast to float32 and copied once more.
Later micro-batches fetch what the host has, add, and send it back.
Source: deepspeed/runtime/zero/stage3.py (partition_grads).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zsim.ir.buffers import Buffer, buffer_of, norm_part, owner_of, role_of
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Op, OpKind
from zsim.ir.sharding import shard_size
from zsim.models.spec import ModelSpec, Parameter
from zsim.models.training_options import DTYPE_NBYTES, Offload, Precision
from zsim.strategies.building.host_step import crossing
from zsim.strategies.building.kernels import MASTER_DTYPE, add_kernel, copy_kernel
from zsim.strategies.deepspeed_engine.offload.placement import Event, placed
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES, Bucket
from zsim.strategies.deepspeed_engine.shards.drives import whole_kib
from zsim.strategies.deepspeed_engine.shards.parameters import drives_of, write_buffer_nbytes
from zsim.strategies.deepspeed_engine.shards.step import ShardedStep

WIDE_NBYTES = DTYPE_NBYTES["float64"]
MOST_NORMED = 250_000_000
"""Elements that DeepSpeed takes a norm of at a time."""
SENT, SUMMED, TOLD, DROPPED = "sent", "summed", "told", "dropped"
"""Place holders: gradients that are sent; the sum of a sub-group's norms, and its end; norms that
are dropped."""


def pinned(
    offload: Offload, options: Any, model: ModelSpec, mesh: Mesh, precision: Precision
) -> int:
    """Bytes of a rank's pinned host memory: gradients in both dtypes and frozen parameters; other
    offloaded parameters and buffers of drives, which are always page-locked."""
    drives = drives_of(offload, options, model, mesh)
    element = DTYPE_NBYTES[precision.parameters]
    trained, locked = sum(drives.sizes), drives.pinned_nbytes
    frozen = sum(shard_size(p.numel, mesh.dp_shard) for p in model.parameters) - trained
    if offload.parameters == "cpu":
        locked += element * trained
    if offload.parameters == "nvme":
        read = whole_kib(offload.parameter_buffer_size * element)
        locked += element * max(1, min(trained, offload.max_in_cpu))
        locked += offload.parameter_buffer_count * read
        locked += write_buffer_nbytes(offload, options, model, mesh, precision)
    in_memory = sum(drives.sizes) - sum(drives.sizes[number] for number in drives.swapped)
    gradients = MASTER_NBYTES * in_memory + element * trained
    return locked + offload.pin_memory * (
        gradients * bool(offload.optimizer) + element * frozen * bool(offload.parameters)
    )


@dataclass(slots=True, kw_only=True)
class OffloadedShardedStep(ShardedStep):
    """ShardedStep with place holders for what a rank sends."""

    _sending: dict[int, Bucket] = field(default_factory=dict)
    """Ops that copy a bucket's shards between device and host."""
    norms_at: int = -1
    """The op after which the host knows the norms of all sub-groups."""

    # -- gradients

    def _sent(self, bucket: Bucket) -> Iterable[Alloc]:
        """A place holder for what sending a rank's shards to the host allocates."""
        return (Alloc(buffer_of(bucket.name, SENT), "gradients", 0),)

    def average(self, bucket: Bucket) -> None:
        """Reduce-scatter a bucket, and copy the rank's shards to the host."""
        ShardedStep.average(self, bucket)
        overlaps = self.sharded.options.overlap_comm
        sent = self.step.issue(
            "copy", bucket.name, waits=self._reduced[-1:], micro_batch=self.micro_batch,
            stream="reduce_scatter" if overlaps else "compute",
        )
        self._sending[sent] = bucket
        self._reduced.append(sent)
        if self.is_last:
            self.step.issue(
                "host_wait", bucket.name, stream="host", waits=(sent,),
                micro_batch=self.micro_batch,
            )

    # -- ranks

    def kind_of(self, rank: int) -> tuple[int, ...]:
        """All that the ops of a rank depend on: the elements of its shards of each size."""
        return tuple(
            self.sharded.local_numel(p, rank=rank) for p in self.sharded.one_of_each_size
        )

    def of_rank(self, rank: int) -> list[Op]:
        """The ops of a rank."""
        ops, numels = list(self.step.ops), self.sharded.local_numels(rank)
        for index in self._placed:
            op = ops[index]
            events = list[Event]()
            for event in op.memory:
                if isinstance(event, Alloc) and not event.nbytes:
                    events += self._own(event, op, numels)
                else:
                    events.append(event)
            memory, host = placed(events, device=self.training.device)
            ops[index] = replace(op, memory=tuple(memory), host=(*op.host, *host))
        # kernels of buckets with shards of the same sizes are one object: the engine knows them so
        alike: dict[tuple[object, ...], tuple[Kernel, ...]] = {}
        for index, bucket in self._sending.items():
            op, swapped = ops[index], self.sharded.swapped
            key = (op.micro_batch, *((numels[p.fqn], p.fqn in swapped) for p in bucket.parameters))
            if key not in alike:
                alike[key] = tuple([
                    kernel for p in bucket.parameters
                    for kernel in self._crossings(p, numels[p.fqn], op)
                ])
            ops[index] = replace(op, kernels=alike[key])
        return ops

    def issue_placed(self, kind: OpKind, unit: str, held: Buffer, **more: Any) -> int:
        """Issue an op whose memory begins with the place holder `held`."""
        memory = [Alloc(held, "temporaries", 0), *more.pop("memory", ())]
        self._placed.append(self.step.issue(kind, unit, memory=memory, **more))
        return self._placed[-1]

    def _own(self, event: MemoryEvent, op: Op, numels: Mapping[str, int]) -> Iterator[Event]:
        """An event of a rank, or what is in place of a place holder."""
        name, part = owner_of(event.buffer), role_of(event.buffer)
        if part not in (SENT, SUMMED, TOLD, DROPPED):
            yield from self._filled(event, numels)
            return
        if part == SENT:
            parameters = self.bucket_of[name].parameters
        else:
            parameters = self.sharded.sub_groups[int(name)] if name else self.sharded.parameters
        filled = [p for p in sorted(parameters, key=self.sharded.turn) if numels[p.fqn]]
        if part == SENT:
            for p in filled:
                yield from self._sent_memory(p, numels[p.fqn], op)
        elif part == SUMMED:
            yield from _summed(len(filled))
        elif part == DROPPED:
            yield from (Free(norm_buffer(p)) for p in filled)
        elif filled:
            yield Free(norm_part("total"))

    def _sent_memory(self, p: Parameter, numel: int, op: Op) -> Iterator[Event]:
        back = Alloc(Buffer("sent.back"), "temporaries", numel * self.sharded.element)
        comes_back = self.training.device != "cpu"
        yield from [back] if comes_back else []
        if op.micro_batch == self.training.batch.accumulation - 1:
            yield from _normed(norm_buffer(p), numel)
            if self.sharded.dtype != MASTER_DTYPE:
                cast = Alloc(Buffer("sent.cast"), "temporaries", numel * MASTER_NBYTES)
                yield from (cast, Free(cast.buffer))
        yield from [Free(back.buffer)] if comes_back else []

    def _crossings(self, p: Parameter, numel: int, op: Op) -> Iterator[Kernel]:
        """The work for a shard of `numel` elements."""
        dtype, pins = self.sharded.dtype, self.training.offload.pin_memory
        sent = crossing("to_host", numel, dtype=dtype, pinned=pins)
        back = crossing("to_device", numel, dtype=dtype, pinned=pins)
        if op.micro_batch:
            yield from (*back, add_kernel(numel, of=dtype, to=dtype), *sent)
        else:
            yield from (*sent, *back)
        if op.micro_batch == self.training.batch.accumulation - 1:
            yield copy_kernel(numel, source=dtype, target="float64")
            yield Kernel("norm", 2 * numel, WIDE_NBYTES * numel, MASTER_DTYPE)
            if dtype != MASTER_DTYPE:
                yield copy_kernel(numel, source=dtype, target=MASTER_DTYPE)
            yield from self._into_host(p, numel)

    def _into_host(self, p: Parameter, numel: int) -> Iterator[Kernel]:
        """The copy of a shard to the gradients that the host steps with."""
        pins = self.training.offload.pin_memory
        yield from crossing("to_host", numel, dtype=MASTER_DTYPE, pinned=pins)

    # -- drives

    def swap_in(self, number: int, *, first: bool) -> None:
        """Read a sub-group in front of its step; in host memory it is there."""

    def swap_out(self, number: int, *, after: int, first: bool) -> None:
        """Write a sub-group behind its step."""


def norm_buffer(parameter: Parameter) -> Buffer:
    """The norm of a shard of a gradient, from its bucket's end to the step's."""
    return buffer_of(parameter.fqn, "norm")


def _normed(name: Buffer, numel: int) -> Iterator[Event]:
    """The norm of a shard: the root of the square of its norm in float64."""
    wide = Alloc(norm_part("wide"), "temporaries", WIDE_NBYTES * min(numel, MOST_NORMED))
    norm, square = (
        Alloc(norm_part(part), "temporaries", WIDE_NBYTES) for part in ("shard", "square")
    )
    yield from (wide, norm, Free(wide.buffer), square, Free(norm.buffer))
    yield from (Alloc(name, "temporaries", WIDE_NBYTES), Free(square.buffer))


def _summed(count: int) -> Iterator[Event]:
    """The sum of the squares of `count` norms."""
    for index in range(count):
        square = Alloc(norm_part("square"), "temporaries", WIDE_NBYTES)
        yield square
        if not index:
            yield Alloc(norm_part("total"), "temporaries", WIDE_NBYTES)
        yield Free(square.buffer)
    yield Alloc(norm_part("sum"), "communication", DTYPE_NBYTES[MASTER_DTYPE])
