"""ScatteringStep: reductions of gradients at stage 3, bucket by bucket.

Source: deepspeed/runtime/zero/stage3.py, runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from zsim.ir.buffers import buffer_of, gradient_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Stream
from zsim.models.spec import ROOT, Parameter
from zsim.strategies.building.kernels import copy_kernel, move_gradients
from zsim.strategies.deepspeed_engine.engine_step import OWN
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.partition import Bucket
from zsim.strategies.deepspeed_engine.shards import quantized_gradients
from zsim.strategies.deepspeed_engine.shards.gathering import GatheringStep
from zsim.strategies.deepspeed_engine.shards.packing import packed

OWN_ENDS = "own_ends"
"""Role of a place holder for the frees of what a rank has for itself."""


@dataclass(slots=True, kw_only=True)
class ScatteringStep(GatheringStep):
    """GatheringStep with hooks of gradients, and with the reductions that these issue."""

    _outputs: list[MemoryEvent] = field(default_factory=list)
    """The free of the gradient of a leaf's output."""

    def hook(self, fqn: str, *, reduces: bool) -> Iterable[MemoryEvent]:
        """Reduce the bucket that would overflow, then copy the gradient into the next one; one
        larger than a bucket stays where it is. Gradients of a leaf wait for its end."""
        if fqn not in self.sharded.leaf_of:
            yield from self._take(fqn)

    def reduce_leaf(self, module: str) -> None:
        """The gradient of a leaf's input is there: its parameters' are reduced in their order."""
        if module not in self.sharded.leaves:
            return
        memory = [
            event for parameter in self.sharded.own[module] if parameter.fqn in self._live
            for event in self._take(parameter.fqn)
        ]
        self._placed.append(self.step.issue(
            "free", ROOT, micro_batch=self.micro_batch, memory=[*memory, *self._outputs]
        ))
        self._outputs = []
        self._average_full()

    def _take(self, fqn: str) -> Iterator[MemoryEvent]:
        if bucket := self._closes.get(fqn):
            yield from self._scattering(bucket)
        if self.gradients.nbytes_of[fqn] // self.sharded.element <= (
            self.sharded.options.reduce_bucket_size
        ):
            self._live.discard(fqn)
            yield Free(gradient_of(fqn))

    def _scattering(self, bucket: Bucket) -> Iterator[MemoryEvent]:
        """Memory of the reduction of a bucket, which leaves this rank's shards, and of their end.
        """
        self._full.append(bucket)
        sharded, element = self.sharded, self.sharded.reduced_element
        ordered = sorted(bucket.parameters, key=self.sharded.turn)
        casts = [
            Alloc(buffer_of(p.fqn, "cast"), "communication", p.numel * element)
            for p in ordered if sharded.casts and not bucket.in_buffer
        ]
        yield from casts
        memory, flat = (
            quantized_gradients.memory(sharded, ordered) if sharded.quantizes_gradients
            else packed(sharded, ordered, name=bucket.name)
        )
        yield from memory
        if sharded.casts:
            yield Alloc(buffer_of(bucket.name, OWN), "gradients", 0)
            yield from (Free(alloc.buffer) for alloc in (*casts, *flat))
        yield from self._sent(bucket)
        if not bucket.in_buffer:
            self._live.discard(bucket.parameters[0].fqn)
            yield Free(gradient_of(bucket.parameters[0].fqn))
        if sharded.casts:
            yield Alloc(buffer_of(bucket.name, OWN_ENDS), "gradients", 0)
        else:
            yield from (Free(alloc.buffer) for alloc in flat)

    def _sent(self, bucket: Bucket) -> Iterable[Alloc]:
        """A place holder for what sending a rank's shards to the host allocates."""
        return ()

    def average(self, bucket: Bucket) -> None:
        """Copy gradients into the bucket and reduce them; add the rank's shards to its gradients.
        """
        sharded, dtype = self.sharded, self.sharded.reduced_in
        padded = sum(map(sharded.shard_numel, bucket.parameters)) * sharded.num_ranks
        moved = move_gradients(bucket.numel, source=sharded.dtype, target=dtype, reduced_in=dtype)
        ready = (self._compute, *self._reduced[-1:])
        if sharded.quantizes_gradients:
            reduced = self._copy(bucket, (moved,), ready, stream="compute")
            for parameter in sorted(bucket.parameters, key=sharded.turn):
                reduced = self._reduce_alone(bucket, parameter, after=reduced)
        else:
            behind = copy_kernel(padded, source=dtype, target=dtype)
            reduced = self._scatter(bucket, padded, (moved, behind), ready)
        own = copy_kernel(padded // sharded.num_ranks, source=dtype, target=sharded.dtype)
        self._reduced.append(self._copy(bucket, (own,), (reduced,), stream=self._beside))

    @property
    def _beside(self) -> Stream:
        """The stream of kernels between and behind reductions."""
        return "reduce_scatter" if self.sharded.options.overlap_comm else "compute"

    def _copy(
        self, bucket: Bucket, kernels: tuple[Kernel, ...], waits: tuple[int, ...], *,
        stream: Stream,
    ) -> int:
        return self.step.issue(
            "copy", bucket.name, waits=waits, micro_batch=self.micro_batch, kernels=kernels,
            stream=stream,
        )

    def _scatter(
        self, bucket: Bucket, padded: int, kernels: tuple[Kernel, ...], waits: tuple[int, ...], *,
        stream: Stream = "compute",
    ) -> int:
        """Divide `padded` elements behind `kernels`, and reduce-scatter them."""
        nbytes, dtype = padded * self.sharded.reduced_element, self.sharded.reduced_in
        divide = Kernel("divide", padded, 2 * nbytes, dtype)
        ready = self._copy(bucket, (*kernels, divide), waits, stream=stream)
        return self.step.issue(
            "reduce_scatter", bucket.name, stream="reduce_scatter", waits=(ready,), group=AXIS,
            nbytes=nbytes, dtype=dtype, micro_batch=self.micro_batch,
        )

    def _reduce_alone(self, bucket: Bucket, parameter: Parameter, *, after: int) -> int:
        """Reduce one gradient in int4, or as it is where it cannot be quantized."""
        sharded, dtype = self.sharded, self.sharded.reduced_in
        if not quantized_gradients.groups(sharded, parameter):
            padded = sharded.shard_numel(parameter) * sharded.num_ranks
            copied = (copy_kernel(padded, source=dtype, target=dtype),)
            return self._scatter(
                bucket, padded, copied if padded > parameter.numel else (), (after,),
                stream=self._beside,
            )
        *before, last = quantized_gradients.kernels(sharded, parameter)
        exchanges = quantized_gradients.exchanges(sharded)
        for kernels, exchange in zip(before, exchanges, strict=True):
            after = self._copy(bucket, kernels, (after,), stream=self._beside)
            for nbytes, sent in quantized_gradients.payloads(sharded, parameter, exchange):
                after = self.step.issue(
                    "all_to_all", bucket.name, stream="reduce_scatter", waits=(after,),
                    group=exchange.group, nbytes=nbytes, dtype=sent, micro_batch=self.micro_batch,
                )
        return self._copy(bucket, last, (after,), stream=self._beside)

    def end_backward(self) -> None:
        """Reduce the last bucket; the host waits for the reductions, and the loss goes."""
        loss = self.return_from_backward()
        memory = list(self._scattering(self.buckets[-1]))
        self._average_full()
        self._placed.append(
            self.step.issue(
                "free", ROOT, stream="host", waits=self._reduced[-1:],
                micro_batch=self.micro_batch, memory=[*memory, *loss],
            )
        )
