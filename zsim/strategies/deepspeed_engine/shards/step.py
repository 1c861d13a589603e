"""ShardedStep: compute and reductions of a step at stage 3.

A linear transposes its weight, and autograd saves that view. So the memory that was gathered for
its forward lives until its backward, also where DeepSpeed has released the parameter. Its own
`memory_efficient_linear` saves none, and is not modelled.
Source: deepspeed/runtime/zero/stage3.py, partition_parameters.py, utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from zsim.autograd.lowering.lowered import LoweredModule, ParameterGradient, TapeEvent
from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Op
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import copy_kernel, move_gradients
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.engine_step import OWN, EngineStep
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.partition import Bucket, buckets
from zsim.strategies.deepspeed_engine.shards.coordinator import Coordinator
from zsim.strategies.deepspeed_engine.shards.gathering import GatheringStep
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.replicated.buckets import ready_order

TRACE = "trace"
"""The unit of broadcasts by which ranks assert that they have recorded the same trace."""
INTEGER = DTYPE_NBYTES["int64"]


def _is_gradient_of(weight: str, event: TapeEvent) -> bool:
    """True where a node makes a gradient of `weight`; a tied one's are summed before they are its
    gradient."""
    if isinstance(event, ParameterGradient):
        return event.fqn == weight
    return isinstance(event, Alloc) and event.buffer.startswith(f"{weight}.grad")


@dataclass(slots=True, kw_only=True)
class ShardedStep(GatheringStep):
    """One training step."""

    asserts: StepBuilder = field(default_factory=StepBuilder)
    """Broadcasts at the beginning of the second step."""
    _of_linear: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Saved buffers by module and weight."""
    _opening: list[MemoryEvent] = field(default_factory=list)
    """Memory events that begin a backward, before the root's hook."""

    @classmethod
    def of(cls, sharded: ShardedParameters) -> ShardedStep:
        """An empty step, in which nothing is whole."""
        made = cls(training=sharded.training, gradients=sharded.gradients, sharded=sharded)
        made.fill(
            buckets(ready_order(sharded.training), most=sharded.options.reduce_bucket_size)
        )
        return made

    # -- compute

    def begin(self, coordinator: Coordinator, *, first: bool) -> None:
        """A forward begins. Ranks assert that their recorded lists are the same: the length, then
        the list."""
        for length in coordinator.begin():
            step = self.step if first else self.asserts
            for numbers in (1, length):
                list_ = Alloc(f"trace.{numbers}", "communication", INTEGER * numbers)
                if numbers:
                    step.issue(
                        "broadcast", TRACE, stream="all_gather", group=AXIS,
                        nbytes=list_.nbytes, dtype="int64", micro_batch=self.micro_batch,
                        memory=(list_, Free(list_.buffer)),
                    )

    def forward(self, module: LoweredModule) -> None:
        """Compute; a linear saves the memory of its weight."""
        EngineStep.forward(self, module)
        for weight in self.sharded.saving[module.fqn]:
            buffer = self._whole[weight]
            self._saved[buffer] = self._saved.get(buffer, 0) + 1
            self._of_linear.setdefault((module.fqn, weight), []).append(buffer)

    def begin_backward(self, seed: Alloc) -> Iterable[MemoryEvent]:
        """These events come before the root's hook, in an op of their own."""
        return ()

    def open_backward(self) -> None:
        """The loss is scaled, and backward begins."""
        seed = self.training.modules[-1].backward.memory[0]
        assert isinstance(seed, Alloc)
        self.step.issue(
            "alloc", ROOT, stream="host", micro_batch=self.micro_batch,
            memory=list(EngineStep.begin_backward(self, seed)),
        )

    def _tape(self, module: LoweredModule) -> Iterator[TapeEvent]:
        """The backward of `module`, in which memory that a linear has saved goes with its node."""
        gone: list[str] = []
        for event in EngineStep._tape(self, module):
            if gone and not isinstance(event, Free | ParameterGradient):
                yield from self._unsaved(gone)
                gone = []
            for weight in self.sharded.saving[module.fqn]:
                saved = self._of_linear.get((module.fqn, weight))
                if saved and _is_gradient_of(weight, event):
                    gone.append(saved.pop())
            yield event
        yield from self._unsaved(gone)

    def _unsaved(self, buffers: Iterable[str]) -> Iterator[Free]:
        for buffer in buffers:
            self._saved[buffer] -= 1
            if not self._saved[buffer] and buffer not in self._whole.values():
                yield Free(buffer)

    # -- reductions

    def hook(self, fqn: str, *, reduces: bool) -> Iterable[MemoryEvent]:
        """Reduce the bucket that would overflow, then copy the gradient into the next one; one
        larger than a bucket stays where it is."""
        if bucket := self._closes.get(fqn):
            yield from self._scattering(bucket)
        if self.gradients.nbytes_of[fqn] // self.sharded.element <= (
            self.sharded.options.reduce_bucket_size
        ):
            self._live.discard(fqn)
            yield Free(f"{fqn}.gradient")

    def _scattering(self, bucket: Bucket) -> Iterator[MemoryEvent]:
        """Memory of a reduce-scatter: zeros behind shards that need them, and all shards rank by
        rank in a copy. A gradient alone that divides evenly is no copy."""
        self._full.append(bucket)
        sharded, element = self.sharded, self.sharded.reduced_element
        ordered = sorted(bucket.parameters, key=self.sharded.turn)
        casts = [
            Alloc(Buffer.of(p.fqn, "cast"), "communication", p.numel * element)
            for p in ordered if sharded.casts and not bucket.in_buffer
        ]
        yield from casts
        pads, flat = list[Alloc](), list[Alloc]()
        if len(ordered) > 1 or ordered[0].numel % sharded.num_ranks:
            for rank in range(sharded.num_ranks):
                for p in ordered:
                    missing = sharded.shard_numel(p) - sharded.local_numel(p, rank=rank)
                    if missing:
                        name = Buffer.of(p.fqn, f"padding.{rank}")
                        pads.append(Alloc(name, "communication", missing * element))
            numel = sum(map(sharded.shard_numel, ordered)) * sharded.num_ranks
            flat = [Alloc(Buffer.of(bucket.name, "flat"), "communication", numel * element)]
        yield from (*pads, *flat)
        yield from (Free(alloc.buffer) for alloc in pads)
        if sharded.casts:
            yield Alloc(Buffer.of(bucket.name, OWN), "gradients", 0)
            yield from (Free(alloc.buffer) for alloc in (*casts, *flat))
        yield from self._sent(bucket)
        if not bucket.in_buffer:
            self._live.discard(bucket.parameters[0].fqn)
            yield Free(f"{bucket.parameters[0].fqn}.gradient")
        if sharded.casts:
            yield Alloc(Buffer.of(f"{bucket.name}.end", OWN), "gradients", 0)
        else:
            yield from (Free(alloc.buffer) for alloc in flat)

    def _sent(self, bucket: Bucket) -> Iterable[Alloc]:
        """A place holder for what sending a rank's shards to the host allocates."""
        return ()

    def average(self, bucket: Bucket) -> None:
        """Copy gradients into the bucket, and shard by shard behind one another; divide, reduce;
        add the rank's shards to its gradients."""
        sharded, dtype = self.sharded, self.sharded.reduced_in
        numel = bucket.numel
        padded = sum(map(sharded.shard_numel, bucket.parameters)) * sharded.num_ranks
        moved = move_gradients(numel, source=sharded.dtype, target=dtype, reduced_in=dtype)
        divide = Kernel("divide", padded, 2 * padded * sharded.reduced_element, dtype)
        ready = self.step.issue(
            "copy", bucket.name, waits=(self._compute, *self._reduced[-1:]),
            micro_batch=self.micro_batch,
            kernels=(moved, copy_kernel(padded, source=dtype, target=dtype), divide),
        )
        reduced = self.step.issue(
            "reduce_scatter", bucket.name, stream="reduce_scatter", waits=(ready,), group=AXIS,
            nbytes=padded * sharded.reduced_element, dtype=dtype, micro_batch=self.micro_batch,
        )
        own = copy_kernel(padded // sharded.num_ranks, source=dtype, target=sharded.dtype)
        self._reduced.append(
            self.step.issue(
                "copy", bucket.name, waits=(reduced,), micro_batch=self.micro_batch,
                kernels=(own,),
                stream="reduce_scatter" if sharded.options.overlap_comm else "compute",
            )
        )

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

    # -- ranks

    def kind_of(self, rank: int) -> tuple[int, ...]:
        """All that the ops of a rank depend on: the elements of its shards, if anything."""
        if not self.sharded.casts:
            return ()
        return tuple(self.sharded.local_numel(p, rank=rank) for p in self.sharded.parameters)

    def of_rank(self, rank: int) -> list[Op]:
        """The ops of a rank, which casts its shards of reduced gradients to the parameters' dtype.
        """
        ops = list(self.step.ops)
        for index in self._placed if self.sharded.casts else ():
            memory = [e for event in ops[index].memory for e in self._filled(event, rank)]
            ops[index] = replace(ops[index], memory=tuple(memory))
        return ops

    def _filled(self, event: MemoryEvent, rank: int) -> Iterator[MemoryEvent]:
        buffer = Buffer(event.buffer)
        if buffer.role != OWN:
            yield event
            return
        name, ends = buffer.owner.removesuffix(".end"), buffer.owner.endswith(".end")
        bucket = next(each for each in self.buckets if each.name == name)
        for p in sorted(bucket.parameters, key=self.sharded.turn):
            numel = self.sharded.local_numel(p, rank=rank)
            shard = Buffer.of(p.fqn, "reduced_shard")
            if numel:
                nbytes = numel * self.sharded.element
                yield Free(shard) if ends else Alloc(shard, "communication", nbytes)
