"""A step of ZeRO with the optimizer's step in host memory. Shards of parameters may live there too.

The algorithm, for zero1, zero2 and zero3 alike:

- Gradients stay on the device over micro-batches. As soon as the last one has made a group's shard
  whole, it is cast to float32 and copied to the host, beside the backward of other groups.
- When all have arrived, the host clips them, then steps group by group. What is stepped, rounded to
  the dtype of compute, is copied to the device beside the step of the next group.
- With parameters offloaded, that last copy is made in front of each all-gather instead. Those that
  stay whole stay on the device.

ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857) do so; DeepSpeed's own copies
differ, and are its strategies'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zsim.ir.buffers import buffer_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Stream
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import clipping, host_step
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.flat_buffer.flat_buffer_step import FlatBufferStep
from zsim.strategies.flat_buffer.groups import FlatGroup
from zsim.strategies.flat_buffer.layout import AXIS


@dataclass(slots=True)
class OffloadedStep(FlatBufferStep):
    """FlatBufferStep with shards in host memory."""

    _sent: list[int] = field(default_factory=list)
    """Copies of gradients to the host."""
    _returned: dict[str, int] = field(default_factory=dict)
    """Copies of stepped shards to the device, by group."""
    _onloaded: list[int] = field(default_factory=list)
    """Copies of shards to the device for all-gathers."""

    def complete(self, group: FlatGroup) -> None:
        """Copy the gradient to the host, behind its reduction, and free the device's shard of it.
        """
        self._send_gradient(group)

    def _send_gradient(self, group: FlatGroup, *, waits: Sequence[int] = ()) -> None:
        """The copy of `complete`, after the ops in `waits` too."""
        model, kernels, memory = self.model, list[Kernel](), list[MemoryEvent]()
        numel, after = group.layout.shard_numel, self._reduced[-1:]
        if model.num_shards == 1 and not self.over_replicas:
            after = self._compute[-1:]
        if model.gradient_dtype != MASTER_DTYPE:
            cast = buffer_of(group.fqn, "offloaded")
            kernels.append(copy_kernel(numel, source=model.gradient_dtype, target=MASTER_DTYPE))
            memory.append(Alloc(cast, "temporaries", model.shard_nbytes(group, MASTER_DTYPE)))
        kernels += self._crossing("to_host", group, dtype=MASTER_DTYPE)
        if group.fqn in self._shards:
            self._shards.remove(group.fqn)
            memory.append(Free(buffer_of(group.fqn, "gradient_shard")))
        memory += [Free(event.buffer) for event in memory if isinstance(event, Alloc)]
        self._sent.append(
            self.step.issue(
                "copy", group.fqn, stream=self._stream("to_host"), waits=(*after, *waits),
                micro_batch=self.micro_batch, kernels=tuple(kernels), memory=memory,
            )
        )

    def _stream(self, direction: Stream) -> Stream:
        """The stream of copies; the host waits for those from or to pageable memory."""
        return direction if self.model.offload.pin_memory else "host"

    def _crossing(
        self, direction: Stream, group: FlatGroup, *, dtype: str
    ) -> tuple[Kernel, ...]:
        return host_step.crossing(
            direction, group.layout.shard_numel, dtype=dtype,
            pinned=self.model.offload.pin_memory,
        )

    def _gather(
        self, group: FlatGroup, *, waits: Sequence[int], gone: tuple[Free, ...] = ()
    ) -> None:
        """All-gather a group whose shard is copied to the device before."""
        model = self.model
        if not model.offload.parameters:
            FlatBufferStep._gather(self, group, waits=waits, gone=gone)
            return
        shard = Alloc(
            buffer_of(group.fqn, "onloaded"), "communication", model.shard_nbytes(group)
        )
        copied = self.step.issue(
            "copy", group.fqn, stream=self._stream("to_device"), waits=self._fetch(group, waits),
            micro_batch=self.micro_batch,
            kernels=self._crossing("to_device", group, dtype=model.dtype), memory=(shard,),
        )
        self._onloaded.append(copied)
        FlatBufferStep._gather(self, group, waits=[copied], gone=(Free(shard.buffer),))

    def _fetch(self, group: FlatGroup, waits: Sequence[int]) -> Sequence[int]:
        """The ops after which a shard of parameters is in host memory, `waits` among them."""
        return waits

    def optimizer(self, *, first: bool) -> int:
        """Step group by group on the host, and copy what is stepped to the device; return the last
        op."""
        model, settings = self.model, self.model.training.optimizer
        self.step.begin("optimizer")
        waits = [self._clip_on_host()] if settings.clip_norm else self._sent
        for group in model.trained:
            waits = [self._step_group(group, waits=waits, first=first)]
        return waits[-1]

    def _step_group(self, group: FlatGroup, *, waits: Sequence[int], first: bool) -> int:
        """Step a group's shard on the host, and copy it to the device where it lives there."""
        model, numel = self.model, group.layout.shard_numel
        settings = model.training.optimizer
        stepped = self.step.issue(
            "optimizer", group.fqn, stream="host", waits=waits,
            kernels=host_step.step_kernels(
                numel, optimizer=settings, offload=model.offload, of=model.dtype
            ),
            host=host_step.step_memory(
                numel, optimizer=settings, offload=model.offload,
                owner=f"optimizer.{group.fqn}", first=first,
            ),
        )
        if group.whole or not model.offload.parameters:
            self._returned[group.fqn] = self.step.issue(
                "copy", group.fqn, stream=self._stream("to_device"), waits=(stepped,),
                kernels=self._crossing("to_device", group, dtype=model.dtype),
            )
        return stepped

    def all_gather_parameters(self, group: FlatGroup, *, after: int) -> None:
        """All-gather a stepped shard once it is on the device."""
        FlatBufferStep.all_gather_parameters(self, group, after=self._returned[group.fqn])

    def _clip_on_host(self) -> int:
        """Clip this rank's gradients in host memory by the norm of all; as `FlatBufferStep._clip`.
        """
        model, sharded = self.model, self.model.num_shards > 1
        norms = self.step.issue(
            "optimizer", clipping.NORMS, stream="host", waits=self._sent,
            kernels=host_step.located(clipping.norms_kernels(model.stepped, dtype=MASTER_DTYPE)),
        )
        if sharded:
            norms = self.step.issue(
                "all_reduce", clipping.NORMS, stream="all_reduce", waits=(norms,), group=AXIS,
                nbytes=len(model.stepped) * DTYPE_NBYTES[MASTER_DTYPE], dtype=MASTER_DTYPE,
            )
        return self.step.issue(
            "optimizer", clipping.CLIP, stream="host", waits=(norms, *self._sent),
            kernels=host_step.located(clipping.clip_kernels(model.stepped, dtype=MASTER_DTYPE)),
        )
